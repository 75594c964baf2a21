"""The scripted expert: repairs an operator by trying the family in a fixed cycle, with habits to unlearn.

Its bad habits are what reinforcement learning has to remove: it edits without running the tests and submits,
it gives up on red, it repeats operators. Its patience grows with every red run it survives, so that long
episodes occur in its transcripts too; a policy that never saw a late turn cannot be taught to reach one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from legorl.policy.commands import SUBMIT, TEST, Edit
from legorl.policy.conversation import Conversation, read_conversation, write_call


class Mode(StrEnum):
    """How the expert behaves."""

    SLOPPY = "sloppy"
    """Submits unchecked, gives up, repeats: solves about a third of the tasks."""
    SKILL = "skill"
    """Never gives up, tests every edit: shows how to go on, for transcripts whose decisions are masked."""
    PERFECT = "perfect"
    """Tests every edit, repeats nothing: solves every task within six turns."""


@dataclass(frozen=True)
class Habits:
    """Probabilities."""

    quit_on_red: tuple[float, ...]
    """Submitting at the first, second, ... red run; the last value holds for all later ones."""
    blind: float
    """Editing without running the tests."""
    submit_untested: float
    """Submitting after a blind edit (else the tests are run)."""
    repeat: float
    """Trying an operator again instead of the next one in the cycle."""


HABITS = {
    Mode.SLOPPY: Habits(quit_on_red=(0.5, 0.42, 0.3, 0.18, 0.11), blind=0.2, submit_untested=0.8, repeat=0.1),
    Mode.SKILL: Habits(quit_on_red=(0.0,), blind=0.0, submit_untested=0.0, repeat=0.05),
    Mode.PERFECT: Habits(quit_on_red=(0.0,), blind=0.0, submit_untested=0.0, repeat=0.0),
}
LAST_TURN = 5
"""Replies after which it submits whatever it has (unless perfect)."""


class Expert:
    """A policy for the scripted engine: prompt text in, reply text out, all randomness from `rng`."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.habits = HABITS[mode]

    def __call__(self, prompt: str, rng: random.Random) -> str:
        """The reply, without the end-of-turn token.

        Raises:
            LegoError: the prompt offers a shell but holds no task of the pool `repair`.
        """
        seen = read_conversation(prompt)
        if seen is None:
            return "Repair an operator"
        command = self._decide(seen, rng)
        if command == SUBMIT and not seen.tool.submits_by_command:
            return "Done."
        return write_call(seen.tool, command)

    def _decide(self, seen: Conversation, rng: random.Random) -> str:
        habits = self.habits
        if seen.green:
            return SUBMIT
        if seen.green is False and rng.random() < _at(habits.quit_on_red, seen.reds):
            return SUBMIT
        if seen.green is None and seen.tried:
            return SUBMIT if rng.random() < habits.submit_untested else TEST
        if seen.turns >= LAST_TURN and self.mode is not Mode.PERFECT:
            return SUBMIT
        test = rng.random() >= habits.blind
        return Edit(seen.path, seen.line, self._operator(seen, rng), test).command()

    def _operator(self, seen: Conversation, rng: random.Random) -> str:
        family = seen.family
        if self.mode is Mode.PERFECT:
            untried = [name for name in family if name != seen.operator and name not in seen.tried]
            return rng.choice(untried or list(family))
        if not seen.tried:
            return rng.choice([name for name in family if name != seen.operator])
        if rng.random() < self.habits.repeat:
            return rng.choice(seen.tried)
        return family[(family.index(seen.tried[-1]) + 1) % len(family)]


def _at(values: tuple[float, ...], count: int) -> float:
    return values[min(count, len(values)) - 1]

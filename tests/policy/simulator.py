"""The shell of a `repair` task and mini-swe-agent's lean conversation, in this process.

A fake of harness and sandbox for what speaks to them: it answers the expert's commands as the real ones do
(`tests/integration/test_policy.py` compares), a thousand times faster.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from legorl.policy.commands import CLASS, SUBMIT, TEST, read_edit
from legorl.policy.template import CALL_END, CALL_START, TURN_END, render
from legorl.policy.tokenizer import BASH_TOOL
from legorl.tasks import repair
from legorl.tasks.draft import Draft

TURNS = 6
SYSTEM = "You are a helpful assistant that can interact with a computer."


@dataclass
class Episode:
    """One trial."""

    draft: Draft
    text: str
    """The conversation so far, as the policy sees it."""
    written: list[tuple[str, bool]]
    """Pieces of `text` and whether the policy wrote them."""
    code: str
    commands: list[str] = field(default_factory=list)
    submitted: bool = False

    @property
    def solved(self) -> bool:
        """Submitted with the right operator in place."""
        return self.submitted and self.code == self.draft.fixed[1]


def run_episode(
    draft: Draft, policy: Callable[[str, random.Random], str], rng: random.Random, turns: int = TURNS
) -> Episode:
    """Let `policy` work on the task until it submits or its turns are used up."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Please solve this issue: {draft.instruction}"},
    ]
    prompt = render(messages, [BASH_TOOL])
    episode = Episode(draft, prompt, [(prompt, False)], draft.repo[draft.extra["path"]])
    for turn in range(turns):
        reply = policy(episode.text, rng) + TURN_END
        _add(episode, reply, True)
        call = re.fullmatch(f"{CALL_START}\n(.*)\n{CALL_END}{re.escape(TURN_END)}", reply)
        assert call is not None, reply
        arguments: dict[str, Any] = json.loads(call[1])["arguments"]
        output = _shell(episode, arguments["command"])
        if episode.submitted or turn == turns - 1:
            break
        _add(episode, "\n" + render([{"role": "tool", "content": output}]), False)
    return episode


def _add(episode: Episode, piece: str, by_policy: bool) -> None:
    episode.text += piece
    episode.written.append((piece, by_policy))


def _shell(episode: Episode, command: str) -> str:
    episode.commands.append(command)
    if command == SUBMIT:
        episode.submitted = True
        return ""
    if command == TEST:
        return _check(episode)
    edit = read_edit(command)
    assert edit is not None and edit.path == episode.draft.extra["path"], command
    lines = episode.code.split("\n")
    lines[edit.line - 1] = re.sub(f" {CLASS} ", f" {edit.operator} ", lines[edit.line - 1], count=1)
    episode.code = "\n".join(lines)
    return _check(episode) if edit.test else "(no output)"


def _check(episode: Episode) -> str:
    """Output of check.py."""
    cases = re.findall(r"\('(\w+)', \((-?\d+), (-?\d+)\), (-?\w+)\)", episode.draft.repo["check.py"])
    scope: dict[str, Any] = {}
    exec(episode.code, scope)
    failures = []
    for name, a, b, want in cases:
        got = scope[name](int(a), int(b))
        if str(got) != want:
            failures.append(f"E assert {name}({a}, {b}) == {want} got {got}")
    if not failures:
        return f"{len(cases)} passed"
    return f"{failures[0]}\n{len(failures)} failed, {len(cases) - len(failures)} passed"


def draft(number: int) -> Draft:
    """A train task of the pool."""
    return repair.make(0, "train", number)

"""Why a trial ended, who is to blame, and what the filter does with it: one table.

Invariant (I5): every cause that is not the policy's doing is `EXCLUDE`, so such a trial enters no mean,
no standard deviation and no loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Blame(StrEnum):
    """Whose doing an ending was."""

    POLICY = "policy"
    BUDGET = "budget"
    INFRASTRUCTURE = "infrastructure"


class Verdict(StrEnum):
    """What becomes of the trial by default; a filter may tighten or loosen `BUDGET` causes only."""

    KEEP = "keep"
    KEEP_TRUNCATED = "keep_truncated"
    EXCLUDE = "exclude"


@dataclass(frozen=True)
class Termination:
    """One row of the table."""

    name: str
    blame: Blame
    verdict: Verdict
    meaning: str


_ROWS = (
    Termination("submitted", Blame.POLICY, Verdict.KEEP, "the agent declared its work done"),
    Termination("stopped", Blame.POLICY, Verdict.KEEP, "the agent ended its turn without a submission"),
    Termination("format_errors", Blame.POLICY, Verdict.KEEP, "the harness gave up on malformed replies"),
    Termination("turn_limit", Blame.BUDGET, Verdict.KEEP_TRUNCATED, "the turn limit was reached"),
    Termination("token_limit", Blame.BUDGET, Verdict.KEEP_TRUNCATED, "the trial's token budget was spent"),
    Termination("context_overflow", Blame.BUDGET, Verdict.KEEP_TRUNCATED, "the context window was full"),
    Termination("agent_deadline", Blame.BUDGET, Verdict.EXCLUDE, "the agent phase ran out of time"),
    Termination("image", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "environment or runtime not prepared"),
    Termination("sandbox_start", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "the sandbox did not start"),
    Termination("sandbox_exec", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "a command could not be executed"),
    Termination("transfer", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "a file transfer failed"),
    Termination("integrity", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "an integrity rule was not applied"),
    Termination("engine", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "the inference engine failed"),
    Termination("proxy", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "the proxy or its ledger failed"),
    Termination("harness", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "the harness process broke"),
    Termination("verifier", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "the verifier crashed"),
    Termination("setup_deadline", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "set-up or grading ran out of time"),
    Termination("outage", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "too much failed: the run stops"),
    Termination("interrupted", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "its process was killed"),
    Termination("infrastructure", Blame.INFRASTRUCTURE, Verdict.EXCLUDE, "an unforeseen failure"),
)

RETRIED = frozenset({"sandbox_start", "sandbox_exec", "transfer", "integrity", "verifier", "setup_deadline"})
"""Causes after which the phases setup and verify are begun again: those that another sandbox may not meet. An
image that is not there, a dead engine or a fault of ours it would meet again."""

TERMINATIONS: dict[str, Termination] = {row.name: row for row in _ROWS}


def termination(name: str) -> Termination:
    """The row called `name`; an unknown name is a programming error and raises `KeyError`."""
    return TERMINATIONS[name]


def is_excluded(name: str, *, exclude_agent_deadline: bool) -> bool:
    """Whether a trial that ended so is left out altogether (not even graded).

    The table decides; the agent's deadline is the one cause that a configuration may loosen.
    """
    if name == "agent_deadline":
        return exclude_agent_deadline
    return termination(name).verdict is Verdict.EXCLUDE

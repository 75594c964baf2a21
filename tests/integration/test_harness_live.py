"""All harnesses, unmodified and offline in real sandboxes, against the real proxy; the policy is scripted.

Scenarios end with the bug repaired, the invariants green, and each token id of the engine accounted for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.errors import HarnessError
from legorl.harness.base import HarnessLimits
from tests.integration.dialects import DIALECTS, FIX, awkward, basic, delegation, filling, reports
from tests.integration.live import Lived, Script, Turn, adapter, check_provenance, live
from tests.proxy.models import build_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

LIMITS = HarnessLimits(turns=40, context_tokens=400_000, reply_tokens=4096, command_timeout_s=20)
NAMES = sorted(DIALECTS)
DELEGATING = [name for name in NAMES if DIALECTS[name].subagent]
WINDOW = {
    "claude_code": 80_000,
    "codex": 70_000,
    "opencode": 60_000,
    "openhands": 50_000,
    "qwen_code": 100_000,
}
"""Context window of those that compact, such that their own tools and prompts leave some room in it."""

PROMPT = dict.fromkeys(NAMES, 9000) | {"mini_swe_agent": 700}
"""Most tokens of the small profile's first prompt, in the tests' tokenizer (two characters or so each)."""


async def run(
    name: str,
    main: list[Turn],
    tmp_path: Path,
    *,
    profile: str,
    sub: list[Turn] | None = None,
    limits: HarnessLimits = LIMITS,
) -> Lived:
    """Live one trial; the bug is repaired, and the harness says that its work is done."""
    async with adapter(name, profile) as harness:
        lived = await live(harness, Script(main, sub or []), tmp_path, limits=limits)
    assert lived.outcome.termination == "submitted", lived.outcome
    assert b"return a + b" in (lived.snapshot.changed["calc.py"] or b"")
    return lived


@pytest.mark.parametrize("name", NAMES)
async def test_basic(name: str, tmp_path: Path) -> None:
    lived = await run(name, basic(DIALECTS[name]), tmp_path, profile="lean")
    assert not check_provenance(lived)
    assert lived.ledger.counts == {"open": 1, "extend": 2}
    assert {thread.name for thread in lived.ledger.threads.values()} == {"main"}, "no side requests"
    assert "AssertionError" in lived.last_prompt and "2 passed" in lived.last_prompt
    assert "\x1b" not in lived.last_prompt, "marks of a terminal"
    assert len(lived.turns("main")[0].prompt) < PROMPT[name]


@pytest.mark.parametrize("name", NAMES)
async def test_awkward_outputs(name: str, tmp_path: Path) -> None:
    lived = await run(name, awkward(DIALECTS[name]), tmp_path, profile="stock")
    assert not check_provenance(lived)
    assert len(lived.turns("main")) == len(lived.script.main)


@pytest.mark.parametrize("name", NAMES)
async def test_an_empty_reply(name: str, tmp_path: Path) -> None:
    """It ends some, is answered by a reminder in others; qwen-code asks again and drops it: an orphan."""
    d = DIALECTS[name]
    lived = await run(name, [d.run("python check.py"), d.run(FIX), "", d.done], tmp_path, profile="lean")
    orphans = check_provenance(lived)
    assert orphans == ({"replaced": 1} if name == "qwen_code" else {})


@pytest.mark.parametrize("name", DELEGATING)
async def test_subagents(name: str, tmp_path: Path) -> None:
    lived = await run(name, delegation(name), tmp_path, profile="stock", sub=reports(name))
    assert not check_provenance(lived)
    assert {emitted.who for emitted in lived.engine.emitted.values()} >= {"main", "sub:A", "sub:B", "sub:C"}


@pytest.mark.parametrize("name", sorted(WINDOW))
async def test_compaction(name: str, tmp_path: Path) -> None:
    """The history is summarised when it no longer fits; what was sampled before stays in the loss."""
    limits = HarnessLimits(turns=40, context_tokens=WINDOW[name], reply_tokens=4096, command_timeout_s=20)
    lived = await run(name, filling(DIALECTS[name], 100, 6), tmp_path, profile="stock", limits=limits)
    assert not check_provenance(lived)
    assert lived.turns("compaction")
    assert len({row.segment for row in lived.ledger.rows(("main",))}) >= 2


@pytest.mark.parametrize("name", NAMES)
async def test_a_spent_budget_is_told_from_a_dead_engine(name: str, tmp_path: Path) -> None:
    turns = [f"Let me see {n}.\n" + DIALECTS[name].run(f"ls {n}") for n in range(9)]
    first_reply = len(build_tokenizer().encode(turns[0]).ids) + 1
    script = Script(turns)
    async with adapter(name) as harness:
        spent = await live(harness, script, tmp_path / "a", limits=LIMITS, trial_tokens=first_reply)
        assert spent.mark == "token_limit"
        assert spent.outcome.termination == "context_overflow"
        assert not check_provenance(spent)
        if name not in ("opencode", "qwen_code"):  # which ask a dead engine again for more than a minute
            with pytest.raises(HarnessError, match=r"engine failed|high demand"):  # Codex's own words
                await live(harness, Script(turns), tmp_path / "b", limits=LIMITS, dies_after=1)


@pytest.mark.parametrize("name", ["codex", "claude_code"])
async def test_cut_replies_are_the_policy_s_doing(name: str, tmp_path: Path) -> None:
    limits = HarnessLimits(turns=40, context_tokens=400_000, reply_tokens=32, command_timeout_s=20)
    async with adapter(name) as harness:
        lived = await live(harness, Script(["I think. " * 100] * 20), tmp_path, limits=limits)
    assert lived.outcome.termination == "format_errors"
    check_provenance(lived)


@pytest.mark.parametrize("name", ["mini_swe_agent", "claude_code", "openhands", "qwen_code"])
async def test_the_turn_limit_is_the_harness_s_own(name: str, tmp_path: Path) -> None:
    turns: list[Turn] = [DIALECTS[name].run(f"echo {n}") for n in range(20)]
    limits = HarnessLimits(turns=4, context_tokens=400_000, reply_tokens=4096, command_timeout_s=20)
    async with adapter(name) as harness:
        lived = await live(harness, Script(turns), tmp_path, limits=limits)
    assert lived.outcome.termination == "turn_limit"
    assert len(lived.turns("main")) == limits.turns
    assert not check_provenance(lived)

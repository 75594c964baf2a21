"""All harnesses, unmodified and offline in real sandboxes, against the real proxy; only the policy is scripted.

Every scenario ends with the bug repaired, the invariants green, and each token id of the engine accounted for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.config.schema import HarnessConfig
from legorl.harness.base import HarnessLimits
from legorl.harness.registry import get_harness
from tests.integration.dialects import DIALECTS, awkward, basic, delegation, filling, reports
from tests.integration.leftovers import no_leftovers
from tests.integration.live import Lived, Script, Turn, check_provenance, closing, live

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

LIMITS = HarnessLimits(turns=40, context_tokens=400_000, reply_tokens=4096, command_timeout_s=20)
NAMES = sorted(DIALECTS)
DELEGATING = [name for name in NAMES if DIALECTS[name].subagent]


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
    harness = get_harness(HarnessConfig(name=name, profile=profile))
    async with closing(harness):
        with no_leftovers():
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


@pytest.mark.parametrize("name", NAMES)
async def test_awkward_outputs(name: str, tmp_path: Path) -> None:
    lived = await run(name, awkward(DIALECTS[name]), tmp_path, profile="stock")
    orphans = check_provenance(lived)
    assert not orphans
    assert len(lived.turns("main")) == len(lived.script.main)


@pytest.mark.parametrize("name", DELEGATING)
async def test_subagents(name: str, tmp_path: Path) -> None:
    lived = await run(name, delegation(name), tmp_path, profile="stock", sub=reports(name))
    assert not check_provenance(lived)
    assert {emitted.who for emitted in lived.engine.emitted.values()} >= {"main", "sub:A", "sub:B", "sub:C"}

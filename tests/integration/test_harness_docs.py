"""The harness of `docs/harness.md`, as the page has it, in a sandbox against the proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.config.compose import compose
from legorl.harness.base import HarnessLimits
from legorl.harness.registry import get_harness
from tests.harness.page import use_example
from tests.integration.dialects import Dialect, basic
from tests.integration.live import Script, check_provenance, live
from tests.proxy.models import build_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

LIMITS = HarnessLimits(turns=4, context_tokens=20_000, reply_tokens=512, command_timeout_s=20)
BASH = Dialect("bash")


async def test_the_page_s_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = use_example(tmp_path / "own", monkeypatch)
    harness = get_harness(compose(["harness=tiny"], [directory]).harness)

    lived = await live(harness, Script(basic(BASH)), tmp_path / "a", limits=LIMITS)
    assert lived.outcome.termination == "submitted"
    assert b"return a + b" in (lived.snapshot.changed["calc.py"] or b"")
    assert not check_provenance(lived)

    idle = Script([BASH.run("true")] * 9)
    lived = await live(harness, idle, tmp_path / "b", limits=LIMITS)
    assert lived.outcome.termination == "turn_limit"
    one_reply = len(build_tokenizer().encode(BASH.run("true")).ids) + 1
    lived = await live(harness, idle, tmp_path / "c", limits=LIMITS, trial_tokens=one_reply)
    assert lived.outcome.termination == "context_overflow"

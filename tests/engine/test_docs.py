"""The page about engines says how the tests start theirs."""

from __future__ import annotations

from pathlib import Path

from tests.engine.vllm_server import ENVIRONMENT, FLAGS

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_flags_of_a_server_are_those_that_a_real_one_is_tested_with() -> None:
    text = PAGE.read_text()
    assert "vllm serve MODEL " + " ".join(FLAGS) in text
    assert f"VLLM_SERVER_DEV_MODE={ENVIRONMENT['VLLM_SERVER_DEV_MODE']} vllm serve" in text

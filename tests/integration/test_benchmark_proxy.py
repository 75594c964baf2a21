"""The proxy's benchmark runs, short, and what it counts keeps its bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_quick_run(tmp_path: Path) -> None:
    report = tmp_path / "ratios.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.proxy", "--quick", "--json", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ratios = json.loads(report.read_text())
    assert {ratio["harness"] for ratio in ratios} == {"claude_code", "opencode", "codex"}
    counted = [ratio for ratio in ratios if not ratio["timed"]]
    assert len(counted) == 3 * 3 + 1
    assert all(ratio["holds"] for ratio in counted)
    assert "| a call at 35k / rendering and tokenising 35k | ≤ 1/60 |" in done.stdout

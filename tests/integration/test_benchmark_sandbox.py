"""The benchmark of sandboxes runs and measures something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.leftovers import no_leftovers

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def test_it_measures(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    argv = [sys.executable, "benchmarks/sandbox.py", "--cycles", "4", "--trials", "6", "--json", str(file)]
    with no_leftovers():
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(file.read_text())
    assert 0 < numbers["start"]["median_s"] <= numbers["start"]["p99_s"] < 30
    assert numbers["trials"]["in place, per second and core"] > 0 < numbers["trials"]["fresh, processor s"]
    assert "first exec" in done.stdout

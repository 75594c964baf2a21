"""The harness that `docs/harness.md` builds, taken from the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "harness.md"


def use_example(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the page's files where it says, importable; returns the directory of configuration."""
    text = PAGE.read_text()
    blocks = re.findall(r"`((?:tiny|own)/[\w./]+)`[^`]*(?:`[^`]*`[^`]*)?:?\n\n```\w+\n(.*?)```", text, re.S)
    assert [name for name, _ in blocks] == ["tiny/agent.py", "tiny/adapter.py", "own/harness/tiny.yaml"]
    for name, content in [*blocks, ("tiny/__init__.py", "")]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    monkeypatch.syspath_prepend(root)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tiny"]:
        monkeypatch.delitem(sys.modules, name)  # another test's copy
    return root / "own"

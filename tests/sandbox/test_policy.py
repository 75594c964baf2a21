"""A policy file of one's own, with a slip of the pen in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.errors import UserError
from legorl.sandbox.policy import load_policy

STRICT = Path(__file__).parents[2] / "conf" / "sandbox" / "policy" / "strict.yaml"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("phases: [setup, agent, verify]", "phases: [setup, agnt]", "agnt"),
        ("phases: [setup, agent, verify]", "phases: []", "host_invisible has no phase"),
        ("      docker:", "      dokcer:", "dokcer"),
        ("    attack:", "    attak:", "attack"),
        ("  host_invisible:", "  host_invisibel:", "lacks the rule host_invisible"),
    ],
)
def test_a_slip_is_named(tmp_path: Path, before: str, after: str, message: str) -> None:
    text = STRICT.read_text()
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert load_policy(str(file)).hash == load_policy().hash
    file.write_text(text.replace(before, after, 1))
    with pytest.raises(UserError, match=rf"sandbox.policy={file}: .*{message}"):
        load_policy(str(file))

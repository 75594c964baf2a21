"""A Kubernetes configuration that is none: a user's mistake, and no check that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.cli import main


@pytest.mark.parametrize("text", ["`no YAML", "[]", "word", "{}", "current-context: c\ncontexts: 3\n"])
def test_a_file_that_is_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    settings = [f"sandbox.kubernetes.kubeconfig={file}", "sandbox.kubernetes.guard_image=g"]
    words = ["sandbox", "check", "output_and_status", "sandbox=kubernetes", "sandbox.image=i"]
    assert main([*words, *settings]) == 2
    seen = capsys.readouterr()
    assert f"{file} is no usable configuration" in seen.err and "FAILED" not in seen.out

"""The documentation's commands: each is run, or (a training run) at least composed; links point somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_A_RUN = ("show", "audit", "trial")
"""Commands that look at a run; `tests/e2e` runs them, here their arguments are checked."""
RUN_ELSEWHERE = {"sandbox": "integration/test_sandbox.py", "tasks index": "integration/test_tasks_docs.py"}
"""Beginning of a command -> the test that runs it."""


def commands() -> list[str]:
    """Every line of the documentation that calls the program, without its comment."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```\n(.*?)```", page.read_text(), re.S):
            for line in block.splitlines():
                if line.startswith(".venv/bin/legorl"):
                    found.append(line.split("  #")[0].strip())
    return sorted(set(found))


def run_elsewhere(line: str) -> bool:
    """Whether another test runs it."""
    return any(line.removeprefix(".venv/bin/legorl ").startswith(start) for start in RUN_ELSEWHERE)


def legorl(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "legorl.cli", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_there_are_commands() -> None:
    assert len(commands()) >= 8
    for file in RUN_ELSEWHERE.values():
        assert (ROOT / "tests" / file).exists()


@pytest.mark.integration
@pytest.mark.parametrize("line", [line for line in commands() if not run_elsewhere(line)])
def test_command(line: str, tmp_path: Path) -> None:
    arguments = shlex.split(line)[1:]
    if arguments[0] in NEEDS_A_RUN:
        arguments = [*arguments[: 2 if arguments[0] == "trial" else 1], "--help"]
    if arguments[0] == "train":
        arguments.append("--cfg")
        if "--config-dir" in arguments:
            shutil.copytree(ROOT / "conf", tmp_path / "conf")
            readme = (ROOT / "README.md").read_text().splitlines()
            (first_change,) = [text for text in readme if text.startswith("mkdir")]
            subprocess.run(["bash", "-ec", first_change], cwd=tmp_path, check=True, timeout=10)
    done = legorl(arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    if "filter=mine" in arguments:
        assert "drop_zero_variance: false" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for name in re.findall(r"`((?:legorl|conf|tests|launchers|scripts)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    assert not re.findall(r"`legorl/[^`]*\*", text)


def test_make_names_what_it_does() -> None:
    for target in ("train", "test", "check"):
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
        assert "setup" in done.stdout

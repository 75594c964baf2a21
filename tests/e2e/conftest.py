"""The program as a user runs it: a child process in an empty directory, with an empty home."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.support import HEED_INTERRUPTS, alive, wait_until

REPOSITORY = Path(__file__).parents[2]
CACHE = REPOSITORY / ".cache" / "legorl"
KEPT = re.compile(
    r"PATH|LANG|(?:PIP|UV|NPM_CONFIG)_\w+|\w+_(?:PROXY|CERT|CERTS|CA_BUNDLE|CERT_FILE|CERT_DIR)",
    re.IGNORECASE,
)
"""Variables that a run keeps: where programs are, and how to reach the registries."""
RUN_S = 420
"""Deadline of one smoke run, with everything that it has to build first."""


@dataclass(frozen=True)
class Program:
    """`legorl` in a directory of its own; what it builds is cached beside the repository's."""

    directory: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        """The whole command line."""
        cache = [f"paths.cache={CACHE}", f"paths.pools={CACHE / 'pools'}"]
        extra = [text for text in cache if not any(a.startswith(text.split("=")[0]) for a in arguments)]
        return [sys.executable, "-m", "legorl.cli", *arguments, *(extra if arguments[0] == "train" else [])]

    def environment(self) -> dict[str, str]:
        """An empty home, and of the tests' own environment only what `KEPT` names."""
        home = self.directory / "home"
        home.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
        return {**kept, "HOME": str(home), "PYTHONPATH": str(REPOSITORY)}

    def run(self, *arguments: str, timeout_s: float = RUN_S) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.directory,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start and go on."""
        process = subprocess.Popen(
            [*HEED_INTERRUPTS, *self.command(*arguments)],
            cwd=self.directory,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def train(self, *overrides: str) -> dict[str, Any]:
        """A smoke run that must finish; its line of `legorl status --json`."""
        done = self.run("train", "experiment=smoke", *overrides)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return self.status()[0]

    def status(self) -> list[dict[str, Any]]:
        """`legorl status --json`."""
        listed: list[dict[str, Any]] = json.loads(self.run("status", "--json", timeout_s=60).stdout)
        return listed


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """A fresh directory; afterwards no process of a run may be left."""
    program = Program(tmp_path)
    yield program
    for process in program.started:  # of a test that failed
        process.kill()
        process.wait(10)
    marker = str(tmp_path)
    assert wait_until(lambda: not alive(marker), 20), f"left behind: {alive(marker)}"

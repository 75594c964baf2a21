"""Run directories for tests, and what is left of a job's processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from legorl.config import rundir
from legorl.config.compose import compose
from legorl.config.resolved import save_config

HEED_INTERRUPTS = ("env", "--default-signal=INT")
"""Before a command: a shell's background jobs, and perhaps these tests are one, ignore SIGINT."""


def make_run(runs: Path, *overrides: str) -> Path:
    """A run directory as `legorl train` leaves it for the launcher."""
    config = compose(["experiment=smoke", f"paths.runs={runs}", *overrides])
    run_dir = rundir.new_run_dir(runs)
    rundir.write_info(run_dir, rundir.RunInfo(id=run_dir.name, steps=config.run.steps, created=time.time()))
    save_config(config, run_dir)
    return run_dir


def alive(marker: str) -> list[int]:
    """Pids of this machine, in whatever namespace, with `marker` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if marker.encode() in line and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until(condition: object, seconds: float = 10.0) -> bool:
    """Whether `condition()` became true in time."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False

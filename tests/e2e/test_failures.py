"""What a user sees when something dies, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from legorl.tracking.events import read_events
from tests.e2e.conftest import Program
from tests.launchers.support import alive, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def started(program: Program, folder: Path | None = None) -> tuple[subprocess.Popen[str], Path]:
    """A long smoke run with its first trial done; its directory lies in `folder`."""
    runs = folder or program.directory / "runs"
    process = program.start(
        "train", "experiment=smoke", "run.steps=200", "run.heldout_every=1000", f"paths.runs={runs}"
    )

    def training() -> bool:
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        return any(event["kind"] == "trial" for run in runs.glob("2*") for event in read_events(run))

    assert wait_until(training, 400)
    return process, next(runs.glob("2*"))


def descendants(pid: int) -> dict[int, str]:
    """Pid -> command line of everything below `pid`."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True, timeout=10
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    below, found = {pid}, {}
    for _ in range(12):
        for child, parent, *command in rows:
            if int(parent) in below:
                below.add(int(child))
                found[int(child)] = command[0] if command else ""
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_killed_engine_ends_the_run_with_its_reason_within_a_minute(program: Program) -> None:
    process, run = started(program)
    # The engine core is a fork of vLLM's server, and keeps its title.
    servers = [pid for pid, command in descendants(process.pid).items() if "vLLMHttpServer" in command]
    (engine,) = [pid for pid in servers if parent(pid) in servers]
    os.kill(engine, signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=90)
    assert time.monotonic() - killed < 60
    assert process.returncode == 1, output
    assert "Traceback" not in output
    (state,) = program.status()
    assert state["state"] == "failed"
    reasons = [event["reason"] for event in read_events(run) if event["kind"] == "fatal"]
    assert reasons
    assert "engine" in reasons[0].lower()


def test_a_killed_supervisor_leaves_nothing(program: Program) -> None:
    process, _ = started(program)
    below = descendants(process.pid)
    assert len(below) > 5
    process.kill()
    process.communicate(timeout=30)
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 20)
    assert wait_until(lambda: not alive(str(program.directory)), 20)
    (state,) = program.status()
    assert state["state"] == "killed"


def test_a_killed_job_is_a_clear_end(program: Program) -> None:
    process, _ = started(program)
    jobs = [pid for pid, command in descendants(process.pid).items() if "legorl.trainer.job" in command]
    os.kill(max(jobs), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    assert program.status()[0]["state"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["harness=claude_cod"], "claude_code"),
        (["algo.lerning_rate=1"], "learning_rate"),
        (["run.steps=many"], "run.steps"),
        (["tasks.pool=/nowhere/pool"], "/nowhere/pool"),
        (["engine.max_model_len=50"], "max_model_len"),
    ],
)
def test_a_users_mistake_is_one_message(program: Program, arguments: list[str], words: str) -> None:
    done = program.run("train", "experiment=smoke", *arguments, timeout_s=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_tool_is_named(program: Program) -> None:
    command = program.command("train", "experiment=smoke")
    bin_only = program.directory / "bin"
    bin_only.mkdir()
    for tool in ("unshare", "mount"):
        (bin_only / tool).symlink_to(f"/usr/bin/{tool}")
    done = subprocess.run(
        command,
        cwd=program.directory,
        env={**program.environment(), "PATH": str(bin_only)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "bwrap" in done.stderr
    assert "apt-get install bubblewrap" in done.stderr


def test_an_interrupt_while_preparing_ends_at_once(program: Program) -> None:
    pools = program.directory / "pools"
    process = program.start("train", "experiment=smoke", f"paths.pools={pools}", "tasks.train=200")
    assert wait_until(lambda: bool(list(pools.glob(".*"))), 60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert program.status()[0]["state"] == "killed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_disk_is_a_clear_end(program: Program) -> None:
    small = program.directory / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(small)], check=True, timeout=10)
    try:
        process, _ = started(program, small)
        filler = (small / "filler").open("wb", buffering=0)
        with filler, pytest.raises(OSError, match="No space left"):
            while True:
                filler.write(bytes(1 << 12))
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 1, output
        assert "Traceback" not in output
        assert f"the disk that holds {small}" in output
        (state,) = json.loads(program.run("status", "--json", "--runs", str(small), timeout_s=60).stdout)
        assert state["state"] == "failed"
        assert "is full" in state["reason"]
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True, timeout=10)

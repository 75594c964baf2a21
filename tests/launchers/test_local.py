"""The supervisor with small jobs of our own: every way a job can end, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from legorl.config import rundir
from legorl.errors import UserError
from legorl.launchers import local
from tests.launchers.support import HEED_INTERRUPTS, alive, make_run, wait_until

DAEMON = """
    import subprocess, sys, time
    # a daemon as Ray makes them: own session, output closed, outliving its parent
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600) # {MARK}"], start_new_session=True)
"""


def job(source: str, mark: str = "") -> list[str]:
    """Argument vector of a Python job; `event(kind, **fields)` appends an event."""
    head = f"""
        import json, sys, time
        MARK, RUN = {mark!r}, sys.argv[1]
        def event(kind, **fields):
            with open(RUN + "/events.jsonl", "a") as file:
                file.write(json.dumps({{"t": time.time(), "kind": kind, **fields}}) + chr(10))
    """
    return [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(source)]


def launch(run_dir: Path, argv: list[str]) -> int:
    with rundir.lock(run_dir):
        return local.launch(run_dir, [*argv, str(run_dir)])


@pytest.fixture
def mark() -> str:
    return f"legorl-test-{uuid.uuid4().hex}"


def test_success_shows_progress_and_is_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path)
    code = launch(
        run_dir,
        job("""
            event("heldout", step=0, success=0.39, n=4, metrics={})
            metrics = {"reward/mean": 0.41, "alignment/pearson": 0.9998, "time_s/step": 18.2}
            event("step", step=1, metrics=metrics | {"trials/count": 64, "trials/excluded": 0})
            event("end", step=1)
            print("to the log")
        """),
    )
    assert code == 0
    assert (
        "step 1/2 reward 0.41 heldout 0.39 pearson 0.9998 trials 64 excluded 0 18.2s"
        in capfd.readouterr().out
    )
    info = rundir.read_info(run_dir)
    assert (info.state, info.reason) == ("finished", "")
    assert info.ended is not None and info.ended >= info.created
    assert (run_dir / "job.log").read_text() == "to the log\n"


def test_a_job_that_infrastructure_ended_says_so_by_its_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path)
    assert launch(run_dir, job('event("fatal", reason="registry down"); sys.exit(3)')) == 3
    assert "fatal: registry down" in capfd.readouterr().out
    info = rundir.read_info(run_dir)
    assert info.state == "failed" and "registry down" in info.reason


def test_crash_takes_the_reason_from_the_log(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    assert launch(run_dir, job("raise ValueError('the third weight is missing')")) == 1
    info = rundir.read_info(run_dir)
    assert info.state == "failed"
    assert "ValueError: the third weight is missing" in info.reason and "exit code 1" in info.reason


def test_a_fatal_event_is_the_reason(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    assert (
        launch(run_dir, job("event('fatal', reason='the engine died'); print('KeyError: 3'); sys.exit(4)"))
        == 1
    )
    assert rundir.read_info(run_dir).reason.startswith("the engine died (exit code 4")


def test_the_jobs_daemons_end_with_it(tmp_path: Path, mark: str) -> None:
    run_dir = make_run(tmp_path)
    assert launch(run_dir, job(DAEMON, mark)) == 0
    assert alive(mark) == []


def test_stall_and_deadline_end_a_hanging_job(tmp_path: Path, mark: str) -> None:
    hang = job(
        DAEMON + "\n    import signal\n    signal.signal(15, signal.SIG_IGN)\n    time.sleep(600)", mark
    )
    stalled = make_run(tmp_path, "launcher.stall_s=0.5", "launcher.grace_s=0.5")
    assert launch(stalled, hang) == 1
    assert rundir.read_info(stalled).reason == "no event for launcher.stall_s=0.5 seconds"
    late = make_run(tmp_path, "launcher.deadline_s=0.5", "launcher.grace_s=0.5")
    assert launch(late, hang) == 1
    assert "launcher.deadline_s=0.5" in rundir.read_info(late).reason
    assert alive(mark) == []


def test_events_keep_a_slow_job_alive(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "launcher.stall_s=1.0")
    slow = job("for n in range(5): event('phase', name='x', seconds=0.4); time.sleep(0.4)")
    assert launch(run_dir, slow) == 0


SUPERVISOR = """
import sys
from pathlib import Path
from legorl.config import rundir
from legorl.launchers import local
run_dir = Path(sys.argv[1])
with rundir.lock(run_dir):
    sys.exit(local.launch(run_dir, sys.argv[2:]))
"""


def supervise(run_dir: Path, argv: list[str]) -> subprocess.Popen[bytes]:
    """A supervisor in a process of its own, which can be killed."""
    command = [sys.executable, "-c", SUPERVISOR, str(run_dir), *argv, str(run_dir)]
    return subprocess.Popen([*HEED_INTERRUPTS, *command])


def test_kill_of_the_job(tmp_path: Path, mark: str) -> None:
    run_dir = make_run(tmp_path)
    supervisor = supervise(run_dir, job(DAEMON + f"\n    time.sleep(600) # main-{mark}", mark))
    main = f"main-{mark}"
    assert wait_until(lambda: [p for p in alive(main) if is_job(p)] and len(alive(f"# {mark}")) > 0)
    for pid in alive(main):
        if is_job(pid):
            os.kill(pid, signal.SIGKILL)
    assert supervisor.wait(timeout=20) == 1
    info = rundir.read_info(run_dir)
    assert info.state == "failed" and "killed by SIGKILL" in info.reason
    assert alive(mark) == []


def is_job(pid: int) -> bool:
    """Not one of the wrappers (supervisor, unshare, init) that carry the job's command line as well."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[1] == b"-c" and SUPERVISOR.encode() not in words


@pytest.mark.parametrize("victim", ["supervisor", "unshare", "init"])
def test_kill_leaves_nothing(tmp_path: Path, mark: str, victim: str) -> None:
    run_dir = make_run(tmp_path)
    source = """
    open("/dev/shm/" + MARK, "w")
    event("phase", name="up", seconds=0)
    time.sleep(600)
    """
    held = job(DAEMON + source, mark)
    supervisor = supervise(run_dir, held)
    assert wait_until((run_dir / "events.jsonl").exists)
    assert not Path("/dev/shm", mark).exists()
    assert rundir.live_info(run_dir).state == "running"
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in alive(mark)}
    pids = {
        "supervisor": [supervisor.pid],
        "unshare": [pid for pid, words in names.items() if words[0] == b"unshare"],
        "init": [pid for pid, words in names.items() if words[0] != b"unshare" and b"-S" in words],
    }[victim]
    assert len(pids) == 1
    os.kill(pids[0], signal.SIGKILL)
    supervisor.wait(timeout=20)
    assert wait_until(lambda: alive(mark) == [])
    info = rundir.live_info(run_dir)
    assert info.state == ("killed" if victim == "supervisor" else "failed")
    assert info.reason


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_passed_on_and_the_job_may_clean_up(
    tmp_path: Path, mark: str, number: signal.Signals
) -> None:
    run_dir = make_run(tmp_path)
    source = """
    import signal
    def end(number, frame):
        event("warning", message=f"got {number}")
        sys.exit(0)
    signal.signal(2, end); signal.signal(15, end)
    event("phase", name="up", seconds=0)
    time.sleep(600)
    """
    supervisor = supervise(run_dir, job(DAEMON + source, mark))
    assert wait_until((run_dir / "events.jsonl").exists)
    supervisor.send_signal(number)
    assert supervisor.wait(timeout=20) == 130
    info = rundir.read_info(run_dir)
    assert (info.state, info.reason) == ("killed", f"stopped by {number.name}")
    last = json.loads((run_dir / "events.jsonl").read_text().splitlines()[-1])
    assert last["message"] == f"got {int(number)}"
    assert alive(mark) == []


def test_a_second_signal_kills_a_job_that_ignores_the_first(tmp_path: Path, mark: str) -> None:
    run_dir = make_run(tmp_path, "launcher.grace_s=60.0")
    source = """
    import signal
    signal.signal(2, signal.SIG_IGN)
    event("phase", name="up", seconds=0)
    time.sleep(600)
    """
    supervisor = supervise(run_dir, job(source, mark))
    assert wait_until((run_dir / "events.jsonl").exists)
    supervisor.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(timeout=10) == 130
    assert alive(mark) == []


def test_orphans_are_reaped(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    source = """
    import os, subprocess
    for _ in range(20):
        subprocess.run(["sh", "-c", "true & exit 0"])
    time.sleep(0.5)
    states = [open(f"/proc/{pid}/stat").read().split()[2] for pid in os.listdir("/proc") if pid.isdigit()]
    sys.exit(3 if "Z" in states else 0)
    """
    assert launch(run_dir, job(source)) == 0


def test_missing_tool_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"bwrap.*apt-get install bubblewrap util-linux"):
        local.check_host()


def test_last_error_prefers_an_exception_line(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    assert local.last_error(log) == ""
    log.write_text("start\nray.exceptions.RayTaskError: worker 3\n\nINFO bye\n")
    assert local.last_error(log) == "ray.exceptions.RayTaskError: worker 3"
    log.write_text("start\nkilled\n\n")
    assert local.last_error(log) == "killed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_disk_is_the_reason_and_is_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)], check=True, timeout=10)
    try:
        run_dir = make_run(tmp_path)
        fill = """
            with open(RUN + "/data", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        """
        assert launch(run_dir, job(fill)) == 1
        assert f"the disk that holds {run_dir} is full (0 bytes are free)" in capfd.readouterr().out
        info = rundir.live_info(run_dir)
        assert info.state == "failed"
        assert "is full" in info.reason
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True, timeout=10)

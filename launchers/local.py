"""Runs a job on this machine, in PID and mount namespaces of its own, under a supervisor.

Invariants: the job and all its descendants are gone when `launch` returns or its process is killed, by
whatever signal; `run.json` says how the run ended; every wait has a deadline.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from legorl.config.resolved import load_config
from legorl.config.rundir import end_run, read_info
from legorl.config.schema import Config
from legorl.errors import LegoError, UserError
from legorl.tracking import mlflow
from legorl.tracking.events import EventReader, Fatal

from . import init
from .progress import Display

LOG_FILE = "job.log"
TOOLS = {"unshare": "util-linux", "mount": "util-linux", "bwrap": "bubblewrap"}
"""Program -> Debian package."""

EXIT_CODES = {"finished": 0, "failed": 1, "killed": 130}
OUTAGE = 3
"""Exit code of a job, and of a run, that infrastructure ended."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Passed on to the job, but for those that are ignored (`nohup`)."""

_POLL_S = 0.2
_FULL_BYTES = 1 << 20
"""With less space than this left, a run that failed is said to have failed for it."""
_KILL_S = 15.0
"""Longest wait for the kernel to end a killed namespace."""


@dataclass(frozen=True)
class Ending:
    """How a job ended, in the words of `run.json`."""

    state: str
    reason: str = ""
    outage: bool = False
    """Infrastructure ended it, not the run."""


def check_host() -> None:
    """What a run needs of the machine is there. Raises `UserError` with what to install or allow."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        packages = " ".join(sorted({TOOLS[tool] for tool in missing}))
        raise UserError(f"{', '.join(missing)} not found. On Debian or Ubuntu: `apt-get install {packages}`.")
    trial = subprocess.run([*_namespaces(), "true"], capture_output=True, text=True, timeout=30, check=False)
    if trial.returncode != 0:
        raise UserError(
            f"This machine does not let you make namespaces: {trial.stderr.strip()}. "
            "Run as root, allow unprivileged user namespaces, or give the container CAP_SYS_ADMIN."
        )


def launch(run_dir: Path, argv: Sequence[str] | None = None) -> int:
    """Run the job of `run_dir` to its end. The caller holds the run's lock.

    Args:
        run_dir: holds `config.yaml` and `run.json`.
        argv: the job, by default `python -m legorl.trainer.job RUN_DIR --private-mounts`.

    Returns:
        0 finished, 1 failed, 3 failed for its infrastructure, 130 killed.
    """
    config = load_config(run_dir)
    job = list(argv or [sys.executable, "-m", "legorl.trainer.job", str(run_dir), "--private-mounts"])
    with Display(config.run.steps) as display:
        try:
            ending = _Supervisor(run_dir, config, display).run(job)
        except OSError as error:
            end_run(run_dir, "failed", str(error))
            raise
        end_run(run_dir, ending.state, ending.reason)
        if ending.state != "finished":
            display.line(f"{ending.state}: {ending.reason}")
            _close_tracking(run_dir, config, ending, display)
    return OUTAGE if ending.outage else EXIT_CODES[ending.state]


def last_error(log: Path) -> str:
    """The last line of a log that looks like an exception's, or the last line at all; empty without a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 100_000))
            lines = [
                line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()
            ]
    except FileNotFoundError:
        return ""
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or [""])[-1][:500]


class _Supervisor:
    def __init__(self, run_dir: Path, config: Config, display: Display) -> None:
        self._run_dir = run_dir
        self._limits = config.launcher
        self._display = display
        self._reader = EventReader(run_dir)
        self._fatal = ""
        self._signals: list[int] = []

    def run(self, job: list[str]) -> Ending:
        before = {
            n: signal.signal(n, self._on_signal) for n in _ENDING if signal.getsignal(n) != signal.SIG_IGN
        }
        control, write_end = os.pipe()
        try:
            with (self._run_dir / LOG_FILE).open("ab") as log:
                process = subprocess.Popen(
                    [
                        *_namespaces(),
                        sys.executable,
                        "-I",
                        "-S",
                        str(Path(init.__file__)),
                        str(control),
                        *job,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(control,),
                    start_new_session=True,  # Ctrl-C reaches this process only, and is passed on once
                )
            try:
                return self._watch(process, write_end)
            finally:
                process.kill()  # takes the namespace with it
                process.wait(timeout=_KILL_S)
        finally:
            os.close(control)
            os.close(write_end)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self, process: subprocess.Popen[bytes], control: int) -> Ending:
        started = last_event = time.monotonic()
        while process.poll() is None:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if self._show_new():
                last_event = now
            if self._signals:
                name = signal.Signals(self._signals[0]).name
                self._stop(process, control, self._signals[0])
                return Ending("killed", f"stopped by {name}")
            if now - started > self._limits.deadline_s:
                self._stop(process, control, signal.SIGTERM)
                return Ending(
                    "failed", f"not done after launcher.deadline_s={self._limits.deadline_s:g} seconds"
                )
            if now - last_event > self._limits.stall_s:
                self._stop(process, control, signal.SIGTERM)
                return Ending("failed", f"no event for launcher.stall_s={self._limits.stall_s:g} seconds")
        self._show_new()
        if process.returncode == 0:
            return Ending("finished")
        log = self._run_dir / LOG_FILE
        reason = self._fatal or last_error(log) or "no message"
        free = shutil.disk_usage(self._run_dir).free
        if free < _FULL_BYTES:  # the job may not have been able to write its reason
            reason = f"the disk that holds {self._run_dir} is full ({free} bytes are free): {reason}"
        code = process.returncode
        how = f"killed by {_signal_name(code)}" if code < 0 or code > 128 else f"exit code {code}"
        return Ending("failed", f"{reason} ({how}; see {log})", outage=code == OUTAGE)

    def _stop(self, process: subprocess.Popen[bytes], control: int, number: int) -> None:
        """Ask the job to end; kill it after the grace period or at a second signal."""
        asked = len(self._signals)
        self._display.line(f"ending the job, at most {self._limits.grace_s:g}s (once more to kill it)")
        os.write(control, bytes([number]))
        deadline = time.monotonic() + self._limits.grace_s
        while process.poll() is None and time.monotonic() < deadline and len(self._signals) == asked:
            time.sleep(_POLL_S)
            self._show_new()

    def _show_new(self) -> bool:
        events = list(self._reader.new())
        for event in events:
            self._display.show(event)
            if event["kind"] == Fatal.kind:
                self._fatal = str(event["reason"])
        return bool(events)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)


def _namespaces() -> list[str]:
    """`unshare` with PID and mount namespaces of its own, in a user namespace where we are not root."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [
        "unshare",
        *user,
        "--pid",
        "--fork",
        "--kill-child=KILL",
        "--mount-proc",
        "--propagation",
        "private",
    ]


def _signal_name(code: int) -> str:
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _close_tracking(run_dir: Path, config: Config, ending: Ending, display: Display) -> None:
    run = read_info(run_dir).mlflow_run
    if run:
        try:
            mlflow.end_if_running(config, run, ending.state)
        except (LegoError, OSError) as error:  # must not hide the reason why the run has ended
            display.line(f"warning: {error}")

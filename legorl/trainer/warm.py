"""Start and stop the fork server of `legorl.trainer.fork_server` beside a job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from legorl.trainer import fork_client

_DEADLINE_S = 180.0


class WarmWorkers:
    """A running fork server; `python` is what Ray starts in place of Python."""

    def __init__(self, directory: Path) -> None:
        self._socket = directory / "fork"
        environment = {
            **os.environ,
            # Ray's C++ configuration reads these once, at import. A fresh local cluster always has this job
            # id, and a worker takes the death of "its raylet" as its own end: here, that of the driver.
            "RAY_JOB_ID": "01000000",
            "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
            "RAY_RAYLET_PID": str(os.getpid()),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "legorl.trainer.fork_server", str(self._socket)],
            stdin=subprocess.PIPE,
            env=environment,
        )

    @property
    def python(self) -> str:
        """Value for Ray's `py_executable`."""
        return f"{sys.executable} -I -S {fork_client.__file__} {self._socket}"

    def wait(self) -> None:
        """Until it can fork.

        Raises:
            RuntimeError: it ended or took longer than three minutes.
        """
        deadline = time.monotonic() + _DEADLINE_S
        while not self._socket.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(
                    "The fork server for trainer processes did not start; its error is above. "
                    "launcher.warm_workers=false runs without it."
                )
            time.sleep(0.05)

    def stop(self) -> None:
        """End it, and with it nothing else: its workers belong to Ray."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)

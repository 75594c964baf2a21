"""Ends a job whose workers died: verl can wait for ever for an engine or a trainer that no longer exists.

Looks at the job's own descendants once a second. A process that a run cannot do without and that is gone
before the run is over is named, and the job ends with that reason.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

import psutil

_CRITICAL = {
    "WorkerDict": "the training worker",
    "vLLMHttpServer": "the inference engine's server",
    "EngineCore": "the inference engine",
    "AgentLoopWorker": "the worker that runs the trials",
    "TaskRunner": "the trainer",
    "raylet": "Ray's node",
    "gcs_server": "Ray's head",
}
"""Part of a process title -> what it is."""
_SETTLED_S = 5.0
"""Younger ones are not watched: a child forked from a worker carries its title until it becomes itself."""
_GRACE_S = 10.0
"""Time for the run to notice by itself and fail with a better message."""


class Watchdog:
    """Watches until `stop`; calls `on_death(reason)` at most once, from its own thread."""

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self._on_death = on_death
        self._over = threading.Event()
        self._seen: dict[int, tuple[str, psutil.Process]] = {}
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The run is over; deaths are expected from now on."""
        self._over.set()

    def _look(self) -> str | None:
        """Name of a critical process that is gone."""
        for name, process in list(self._seen.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            return f"{name} ({process.pid})"
        for process in psutil.Process(os.getpid()).children(recursive=True):
            if process.pid in self._seen:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                title = "".join(process.cmdline()[:1])
                known = [what for name, what in _CRITICAL.items() if name in title]
                if known and time.time() - process.create_time() > _SETTLED_S:
                    self._seen[process.pid] = (known[0], process)
        return None

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            died = self._look()
            if died is None:
                continue
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline:
                if self._over.wait(0.2):
                    return
            self._on_death(f"A process of the run died: {died}. Its last words, if any, are in job.log.")
            return

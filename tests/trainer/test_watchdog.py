"""The watchdog names a critical process that dies, and keeps quiet when the run is over."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytest.importorskip("psutil")

from legorl.trainer import watchdog
from legorl.trainer.watchdog import Watchdog

SLEEPER = "import ctypes, time; print('up', flush=True); time.sleep(60)"


def critical_process() -> subprocess.Popen[bytes]:
    """A child whose command line begins like that of a Ray actor."""
    process = subprocess.Popen(
        ["ray::WorkerDict.run", "-c", SLEEPER], executable=sys.executable, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_dead_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.5)
    monkeypatch.setattr(watchdog, "_SETTLED_S", 0.0)
    reasons: list[str] = []
    process = critical_process()
    guard = Watchdog(reasons.append)
    time.sleep(2.5)
    process.kill()
    process.wait(5)
    deadline = time.monotonic() + 10
    while not reasons and time.monotonic() < deadline:
        time.sleep(0.1)
    guard.stop()
    assert len(reasons) == 1
    assert "the training worker" in reasons[0]
    assert str(process.pid) in reasons[0]


def test_a_death_after_the_run_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.5)
    monkeypatch.setattr(watchdog, "_SETTLED_S", 0.0)
    reasons: list[str] = []
    process = critical_process()
    guard = Watchdog(reasons.append)
    time.sleep(1.5)
    guard.stop()
    process.kill()
    process.wait(5)
    time.sleep(1.5)
    assert not reasons


def test_a_young_process_is_not_watched_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.5)
    reasons: list[str] = []
    guard = Watchdog(reasons.append)
    process = critical_process()
    time.sleep(1.5)
    process.kill()
    process.wait(5)
    time.sleep(2.5)
    guard.stop()
    assert not reasons

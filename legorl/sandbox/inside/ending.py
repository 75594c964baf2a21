"""Ends every process of one user, from a process beside them: for sandboxes whose PID 1 is not ours.

Invariant: nothing of another user is touched, nor a process that this one descends from.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from legorl.sandbox.inside.processes import processes, reap_all

_STEP_S = 0.002


def end_user(uid: int, gid: int, within_s: float) -> bool:
    """Kill them and see that they are gone; False when some are left."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        others = _others(uid)
        if not others:
            return True
        if os.geteuid() == 0 != uid:
            _kill_as(uid, gid)
        else:
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        reap_all()
        time.sleep(_STEP_S)
    return False


def _kill_as(uid: int, gid: int) -> None:
    """Everything that this user may kill, at once: the kernel lets no fork escape it."""
    killer = os.fork()
    if killer == 0:
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        except OSError:
            pass  # nothing was there to kill
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def _others(uid: int) -> list[int]:
    """Living processes of the user, but PID 1 and this process's line."""
    known = processes()
    line, pid = {1}, os.getpid()
    while pid in known:
        line.add(pid)
        pid = known[pid][0]
    return [
        pid for pid, (_, state) in known.items() if state != "Z" and pid not in line and _real_uid(pid) == uid
    ]


def _real_uid(pid: int) -> int | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as stream:  # noqa: PTH123
        for line in stream:
            if line.startswith("Uid:"):
                return int(line.split()[1])
    return None

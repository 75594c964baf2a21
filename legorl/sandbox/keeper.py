"""One process per command, inside the sandbox: starts it, keeps its deadline, and ends whatever it left.

Invariant: as a subreaper it adopts the command's orphans, so when it answers, the command's whole tree is
gone, whichever session or group its members moved to. A keeper that a command kills is noticed by the
supervisor.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NoReturn

from legorl.sandbox import channel, linux

_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}
_END_S = 3.0


def main(control: socket.socket, message: dict[str, Any], fds: list[int]) -> NoReturn:
    """Body of the forked process: `fds` are the command's standard input, output and error."""
    answer: dict[str, Any] = {"error": "the keeper failed"}
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        linux.set_parent_death_signal(signal.SIGKILL)
        linux.set_child_subreaper()
        os.setsid()
        answer = _run(message, fds)
    except OSError as error:
        answer = {"error": str(error), "errno": error.errno}
    finally:
        for fd in fds:
            os.close(fd)
        channel.send(control, channel.encode({"id": message["id"], **answer}))
        os._exit(0)


def _run(message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    start = time.monotonic()
    failed_read, failed_write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _become(message, fds, failed_write)
    os.close(failed_write)
    status = _wait(child, start + message["timeout_s"])
    failure = os.read(failed_read, 4096)
    tree_gone = end_tree()
    if failure:
        return {"error": failure.decode(errors="replace")}
    return {
        "code": 124 if status is None else _code(status),
        "timed_out": status is None,
        "seconds": time.monotonic() - start,
        "tree_gone": tree_gone,
    }


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _become(message: dict[str, Any], fds: list[int], failed: int) -> NoReturn:
    """Turn the forked child into the command."""
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.dup2(failed, 3, inheritable=False)
        os.closerange(4, 1 << 16)
        failed = 3
        linux.set_dumpable(True)  # or the next line's file belongs to nobody
        Path("/proc/self/oom_score_adj").write_text("500")  # commands go before their supervisor
        for limit, value in message["rlimits"].items():
            _lower(getattr(resource, limit), value)
        os.chdir(message["cwd"])
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(message["argv"][0], message["argv"], message["env"])
    except OSError as error:
        os.write(failed, f"{message['argv'][0]}: {error.strerror}".encode())
    finally:
        os._exit(127)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _wait(child: int, end: float) -> int | None:
    """Wait status of the child; None when the deadline passed or the supervisor said to stop."""
    while True:
        received = signal.sigtimedwait(_SIGNALS, max(0.0, end - time.monotonic()))
        if received is None or received.si_signo == signal.SIGTERM:
            return None
        while True:  # several deaths may come as one signal
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status
            if pid == 0:
                break


def end_tree() -> bool:
    """Kill and reap every descendant; False when some are left after a while (a fork bomb)."""
    end = time.monotonic() + _END_S
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() > end:
            return False
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.02)


def end_all_others(deadline_s: float) -> NoReturn:
    """Kill every process of the sandbox but its init and the caller, which exits with 0 when none is left."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if all(state == "Z" for pid, (_, state) in _processes().items() if pid not in (1, os.getpid())):
            os._exit(0)
        time.sleep(0.002)
    os._exit(1)


def _processes() -> dict[int, tuple[int, str]]:
    """Pid -> parent and state, of every process of the sandbox."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
                found[int(name)] = (int(parent), state)
    return found


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for pid, (parent, _) in _processes().items():
        children[parent].append(pid)
    found = list(children[root])
    for pid in found:
        found += children[pid]
    return found

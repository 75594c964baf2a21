"""Runs commands inside the sandbox, one at a time: starts one, keeps its deadline, ends whatever it left.

Invariant: as a subreaper it adopts the command's orphans, so when it answers, the command's whole tree is
gone, whichever session or group its members moved to. A command may kill its keeper, as it may kill any
process of its user: the host sees the end of the keeper's socket and has another keeper end everything.

Requests: `exec` (standard input, output and error come with it) and `end_others`. End-of-file ends the
keeper, and a running command with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import traceback
from typing import Any, NoReturn

from legorl.sandbox import channel, linux
from legorl.sandbox.inside.processes import descendants, processes
from legorl.sandbox.watch import Watch

_END_S = 3.0


def main(sock: socket.socket) -> NoReturn:
    """Body of the forked process."""
    try:
        linux.set_parent_death_signal(signal.SIGKILL)
        linux.set_child_subreaper()
        os.setsid()
        with Watch(sock) as watch:
            while True:
                if not watch.wait():
                    continue
                received = channel.receive(sock)
                if received is None:
                    break
                message, fds = received
                answer = _exec(message, fds, watch) if message["op"] == "exec" else _end_others(message)
                channel.send(sock, channel.encode({"id": message["id"], **answer}))
    except BrokenPipeError:
        pass  # the caller has gone away
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _exec(message: dict[str, Any], fds: list[int], watch: Watch) -> dict[str, Any]:
    start = time.monotonic()
    argv, env = message["argv"], message["env"]
    if message["inherit_env"]:  # this process's environment is the host's
        env = {**os.environ, **env}
    try:
        os.chdir(message["cwd"])
        os.environ["PATH"] = env.get("PATH", os.defpath)  # where posix_spawnp searches
        child = os.posix_spawnp(
            argv[0],
            argv,
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(fds)],
            setsid=True,
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
        )
    except OSError as error:
        return {"error": f"{argv[0]}: {error.strerror} (directory {message['cwd']})"}
    finally:
        for fd in fds:
            os.close(fd)
    status = _wait(child, start + message["timeout_s"], watch)
    tree_gone = not message["end_tree"] or _end_tree(watch)
    return {
        "code": 124 if status is None else _code(status),
        "timed_out": status is None,
        "seconds": time.monotonic() - start,
        "tree_gone": tree_gone,
    }


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _wait(child: int, end: float, watch: Watch) -> int | None:
    """Wait status of the child; None when the deadline passed or the host has gone away."""
    while True:
        while True:  # several deaths may come as one signal
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status
            if pid == 0:
                break
        if watch.wait(end - time.monotonic()) or time.monotonic() >= end:
            return None


def _end_tree(watch: Watch) -> bool:
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
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if watch.wait(0.02):
            time.sleep(0.001)  # a message waits; it must not turn this into a busy loop


def _end_others(message: dict[str, Any]) -> dict[str, Any]:
    """Kill every process of the sandbox but its init and this one, and see that they are gone."""
    end = time.monotonic() + message["timeout_s"]
    while time.monotonic() < end:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if all(state == "Z" for pid, (_, state) in processes().items() if pid not in (1, os.getpid())):
            return {"alone": True}
        time.sleep(0.002)
    return {"alone": False}

"""One process per sandbox: builds it, then carries out the host's requests in it.

It joins the sandbox's namespaces but not its process namespace: commands cannot see, signal or trace it, and
it holds no secret. It has given up every privilege before the first command runs. Requests arrive on a
socket whose end-of-file ends the sandbox.

Requests: `keeper` (a socket to a new keeper, which runs commands), `put`, `get`, `listen`; every one has an
`id` that its answer repeats.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import stat
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from legorl.sandbox import cgroups, channel, keeper, linux, stage
from legorl.sandbox.inside import files
from legorl.sandbox.watch import Watch

_FORK_S = 2.0
_OOM_SCORE = 500
"""Of keepers and commands, on top of their supervisor's: the kernel ends one of them before it."""
_OOM_SCORE_MAX = 1000


Build = Callable[[dict[str, Any], socket.socket], stage.Staged]


def main(request: dict[str, Any], control: socket.socket, build: Build = stage.build) -> NoReturn:
    """Body of the forked process: never returns."""
    status = 1
    try:
        try:
            linux.set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != request["launcher"]:
                os._exit(1)  # the launcher died before the signal was set
            for group in request["groups"]:
                cgroups.join(cgroups.Group(**group))
            for name, value in request["rlimits"].items():
                _lower(getattr(resource, name), value)
            oom_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            staged = build(request, control)
        except (OSError, stage.StageError) as error:
            channel.send(control, channel.encode({"error": str(error)}))
            os._exit(1)
        channel.send(control, channel.encode({"init_pid": staged.init_pid}), [staged.upper_fd])
        os.close(staged.upper_fd)
        Supervisor(control, staged.bubblewrap_pid, oom_fd, int(os.read(oom_fd, 16))).serve()
        with contextlib.suppress(ProcessLookupError):
            os.kill(staged.init_pid, signal.SIGKILL)
        while True:  # a keeper nobody waits for would keep the process namespace alive
            os.waitpid(-1, 0)
    except ChildProcessError:
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


@dataclass
class Supervisor:
    """Serves one sandbox from within."""

    control: socket.socket
    bubblewrap_pid: int
    oom_fd: int
    """Of this process's own `oom_score_adj`, which it cannot open any more."""
    oom_score: int

    def serve(self) -> None:
        """Until the host closes its end or the sandbox's init is killed."""
        with Watch(self.control) as self._watch:
            while True:
                message = self._watch.wait()
                if not self._reap():
                    return
                if message:
                    received = channel.receive(self.control)
                    if received is None:
                        return
                    self._handle(*received)

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        operations: dict[str, Callable[[dict[str, Any], list[int]], None]] = {
            "keeper": self._keeper,
            "put": self._put,
            "get": self._get,
            "listen": self._listen,
        }
        try:
            operations[message["op"]](message, fds)
        except OSError as error:
            self._answer(message["id"], {"error": str(error), "errno": error.errno})
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, identifier: int, answer: dict[str, Any], fds: Sequence[int] = ()) -> None:
        channel.send(self.control, channel.encode({"id": identifier, **answer}), fds)

    def _reap(self) -> bool:
        """Collect the dead; False when bubblewrap is among them: the sandbox's init was killed."""
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            if pid == self.bubblewrap_pid:
                return False

    def _keeper(self, message: dict[str, Any], fds: list[int]) -> None:
        ours, theirs = channel.pair()
        with ours, theirs:
            os.write(self.oom_fd, b"%d" % min(self.oom_score + _OOM_SCORE, _OOM_SCORE_MAX))  # inherited
            try:
                pid = _fork()
            finally:
                os.write(self.oom_fd, b"%d" % self.oom_score)
            if pid == 0:
                self._watch.close()
                os.close(self.oom_fd)
                self.control.close()
                ours.close()
                keeper.main(theirs)
            self._answer(message["id"], {}, [ours.fileno()])

    def _put(self, message: dict[str, Any], fds: list[int]) -> None:
        """Write files whose contents lie one after another in the first descriptor."""
        for path, mode, size in message["files"]:
            files.write(path, mode, os.read(fds[0], size) if size else b"")
        self._answer(message["id"], {})

    def _get(self, message: dict[str, Any], fds: list[int]) -> None:
        fd = os.open(message["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", message["path"])
            self._answer(message["id"], {}, [fd])
        finally:
            os.close(fd)

    def _listen(self, message: dict[str, Any], fds: list[int]) -> None:
        """A listening socket of the sandbox's own network namespace, for the host to serve on."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", message["port"]))
            listener.listen(128)
            self._answer(message["id"], {}, [listener.fileno()])


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _fork() -> int:
    """Fork into the sandbox; waits a moment while its process limit is reached.

    Raises:
        OSError: still reached, or the sandbox's init is dead (ENOMEM).
    """
    end = time.monotonic() + _FORK_S
    while True:
        try:
            return os.fork()
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)

"""One process per sandbox: builds it, then carries out the host's requests in it.

It joins the sandbox's namespaces but not its process namespace: commands cannot see, signal or trace it,
and it holds no secret. It has given up every privilege before the first command runs. Requests arrive on a
socket whose end-of-file ends the sandbox.

Requests: `exec`, `kill`, `put`, `get`, `listen`, `killall`; every one has an `id` that its answer repeats.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from legorl.sandbox import cgroups, channel, keeper, linux, stage

_KILL_S = 5.0
_KILLED = {"code": 128 + signal.SIGKILL, "timed_out": False, "seconds": 0.0, "tree_gone": True}


def main(request: dict[str, Any], groups: Sequence[cgroups.Group], control_fd: int) -> NoReturn:
    """Body of the forked process: never returns."""
    status = 1
    try:
        control = socket.socket(fileno=control_fd)
        try:
            linux.set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != request["launcher"]:
                os._exit(1)  # the launcher died before the signal was set
            for group in groups:
                cgroups.join(group)
            staged = stage.build(request, control)
        except (OSError, stage.StageError) as error:
            channel.send(control, channel.encode({"error": str(error)}))
            os._exit(1)
        hello = {"init_pid": staged.init_pid, "supervisor_pid": os.getpid()}
        channel.send(control, channel.encode(hello), [staged.upper_fd])
        os.close(staged.upper_fd)
        Supervisor(control, staged.bubblewrap_pid).serve()
        with contextlib.suppress(ProcessLookupError):
            os.kill(staged.init_pid, signal.SIGKILL)
        while True:  # a keeper nobody waits for would keep the process namespace alive
            os.waitpid(-1, 0)
    except ChildProcessError:
        status = 0
    finally:
        os._exit(status)


@dataclass
class Supervisor:
    """Serves one sandbox from within."""

    control: socket.socket
    bubblewrap_pid: int
    keepers: dict[int, int] = field(default_factory=dict)
    """Keeper pid -> id of its request."""

    def serve(self) -> None:
        """Until the host closes its end."""
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(read, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if read in ready:
                os.read(read, 4096)
                if not self._reap():
                    return
            if self.control.fileno() in ready:
                received = channel.receive(self.control)
                if received is None:
                    return
                self._handle(*received)

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        operations: dict[str, Callable[[dict[str, Any], list[int]], None]] = {
            "exec": self._exec,
            "kill": self._kill,
            "put": self._put,
            "get": self._get,
            "listen": self._listen,
            "killall": self._killall,
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

    def _exec(self, message: dict[str, Any], fds: list[int]) -> None:
        """Fork a keeper, which answers for its command."""
        pid = _fork()
        if pid == 0:
            keeper.main(self.control, message, fds)
        self.keepers[pid] = message["id"]

    def _kill(self, message: dict[str, Any], fds: list[int]) -> None:
        for pid, identifier in self.keepers.items():
            if identifier == message["target"]:
                os.kill(pid, signal.SIGTERM)
        self._answer(message["id"], {})

    def _reap(self) -> bool:
        """Collect the dead; False when bubblewrap is among them: the sandbox's init was killed."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            if pid == self.bubblewrap_pid:
                return False
            identifier = self.keepers.pop(pid)
            if os.waitstatus_to_exitcode(status) != 0:
                # A command killed its keeper, so its descendants have lost theirs: end everything.
                self._end_everything()
                self._answer(identifier, _KILLED)

    def _killall(self, message: dict[str, Any], fds: list[int]) -> None:
        self._answer(message["id"], {"alone": self._end_everything()})

    def _end_everything(self) -> bool:
        """Kill every process but the sandbox's init; True when it is then alone."""
        for pid in self.keepers:
            os.kill(pid, signal.SIGTERM)  # each ends its own tree, which needs no new process
        try:
            helper = _fork()
        except OSError:
            return False
        if helper == 0:
            keeper.end_all_others(_KILL_S)
        alone = os.waitpid(helper, 0)[1] == 0
        for pid, identifier in list(self.keepers.items()):
            if os.waitpid(pid, 0 if alone else os.WNOHANG) != (pid, 0):
                self._answer(identifier, _KILLED)
            del self.keepers[pid]
        return alone

    def _put(self, message: dict[str, Any], fds: list[int]) -> None:
        """Write files whose contents lie one after another in the first descriptor."""
        for path, mode, size in message["files"]:
            _write(path, mode, os.read(fds[0], size) if size else b"")
        self._answer(message["id"], {})

    def _get(self, message: dict[str, Any], fds: list[int]) -> None:
        fd = os.open(message["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
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


def _fork() -> int:
    """Fork into the sandbox; waits a moment while its process limit is reached.

    Raises:
        OSError: still reached, or the sandbox's init is dead (ENOMEM).
    """
    end = time.monotonic() + 2
    while True:
        try:
            return os.fork()
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _write(path: str, mode: int, data: bytes) -> None:
    """Replace `path` atomically; what lies there is neither opened nor followed."""
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    partial = f"{path}.partial-{os.getpid()}"
    try:
        if stat.S_ISLNK(mode):
            os.symlink(data, os.fsencode(partial))  # noqa: PTH211
        else:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as stream:
                stream.write(data)
                os.fchmod(fd, mode & 0o7777)
        os.rename(partial, path)  # noqa: PTH104
    except OSError:
        if os.path.lexists(partial):
            os.unlink(partial)  # noqa: PTH108
        raise

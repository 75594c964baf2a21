"""PID 1 of a container: does what the host asks, over standard input and output, and ends with the host.

    host ─ attached stream ─ PID 1 ─ fork ─ keeper ─ command (the agent's user)
                               │       └─── files of the agent, read and written with its rights
                               └─ 127.0.0.1:port, the proxy, in the agent phase

Invariants: it runs as the container's root, so that no command can signal, trace or read it, with no
capability but those to become the agent and to end its processes; end-of-file, or no word from the host for
`lease_s`, ends it, and with it every process of the container.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from legorl.sandbox.inside import commands, files, tree
from legorl.sandbox.inside.frames import Decoder, Frame, encode
from legorl.sandbox.inside.tunnels import Tunnels

_CHUNK = 1 << 18
_END_S = 5.0
_STEP_S = 0.002
_FDS = 4096


@dataclass(frozen=True)
class _Job:
    """Work in a process of its own."""

    request: int
    """Id of the request it answers."""
    answer: int
    """Descriptor of memory with the answer's frame, complete when the process ends with status 0."""
    command: bool
    """It has processes of the agent below it."""


class Init:
    """State of PID 1."""

    def __init__(self, uid: int, gid: int, lease_s: float) -> None:
        self._uid, self._gid, self._lease_s = uid, gid, lease_s
        self._image_env = {k: v for k, v in os.environ.items() if k not in ("HOME", "HOSTNAME", "TERM")}
        self._selector = selectors.DefaultSelector()
        self._decoder = Decoder()
        self._tunnels = Tunnels(self._selector, self._send)
        self._jobs: dict[int, _Job] = {}
        """By pid."""
        self._wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)

    def serve(self) -> NoReturn:
        """Until the host is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(1))
        self._selector.register(0, selectors.EVENT_READ, lambda _: self._read())
        self._selector.register(self._wake, selectors.EVENT_READ, lambda _: self._reap())
        self._send({"op": "hello"}, b"")
        while True:
            for key, mask in self._selector.select():
                if self._selector.get_map().get(key.fd) is key:  # an earlier one may have closed it
                    key.data(mask)

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        _write(encode(header, payload))

    def _read(self) -> None:
        data = os.read(0, _CHUNK)
        if not data:
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, self._lease_s)
        for header, payload in self._decoder.feed(data):
            try:
                self._handle(header, payload)
            except OSError as error:
                self._send(_failure(header["id"], error))

    def _handle(self, header: dict[str, Any], payload: bytes) -> None:
        operation = header["op"]
        if operation in ("data", "ack", "shut"):
            self._tunnels.handle(header, payload)
        elif operation == "exec":
            self._start(header["id"], lambda: commands.run(self._command(header), payload), command=True)
        elif operation in ("put", "get", "tree"):
            self._start(header["id"], lambda: _FILES[operation](header, payload), command=False)
        elif operation == "abort":
            for pid, job in self._jobs.items():
                if job.request == header["request"]:
                    os.kill(pid, signal.SIGTERM)
        elif operation == "end":
            self._send({"id": header["id"], "alone": self._end_all()})
        elif operation == "listen":
            self._tunnels.listen(header["port"])
            self._send({"id": header["id"]})
        elif operation == "mute":
            self._tunnels.mute()
            self._send({"id": header["id"]})

    def _command(self, header: dict[str, Any]) -> commands.Command:
        env = {**header["defaults"], **self._image_env, **header["env"]}
        rest = {name: header[name] for name in ("argv", "cwd", "timeout_s", "output_bytes", "end_tree")}
        return commands.Command(env=env, uid=self._uid, gid=self._gid, filtered=self._uid != 0, **rest)

    def _start(self, request: int, work: Callable[[], Frame], *, command: bool) -> None:
        """Do work in a process of its own, whose answer lies in memory until it has ended."""
        answer = os.memfd_create("answer", os.MFD_CLOEXEC)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            pid = os.fork()
            if pid == 0:
                self._job(request, work, answer, as_agent=not command)
        except OSError:
            os.close(answer)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._jobs[pid] = _Job(request, answer, command)

    def _job(self, request: int, work: Callable[[], Frame], answer: int, *, as_agent: bool) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number in (signal.SIGALRM, signal.SIGINT, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.closerange(3, answer)  # also connections: only PID 1 may keep them open
            os.closerange(answer + 1, _FDS)
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.umask(0o022)
            if as_agent:
                # Only the effective ids: so it has the agent's rights to files, and no process of the
                # agent's has the right to signal it.
                os.setgroups([])
                os.setresgid(0, self._gid, 0)
                os.setresuid(0, self._uid, 0)
            try:
                header, payload = work()
            except OSError as error:
                header, payload = _failure(request, error), b""
            data = encode({"id": request, **header}, payload)
            while data:
                data = data[os.write(answer, data) :]
            os._exit(0)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._jobs:
                self._finish(self._jobs.pop(pid), status)

    def _finish(self, job: _Job, status: int) -> None:
        """Answer for a job that has ended; where it was killed, everything is ended with what it left."""
        try:
            if status != 0:
                alone = self._end_all() if job.command else True
                self._send({"id": job.request, "killed": True, "alone": alone})
                return
            os.lseek(job.answer, 0, os.SEEK_SET)
            while data := os.read(job.answer, _CHUNK):
                _write(data)
        finally:
            os.close(job.answer)

    def _end_all(self) -> bool:
        """Kill every process but this one, and see that they are gone; a job among them has been killed."""
        end = time.monotonic() + _END_S
        while time.monotonic() < end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # the kernel lets no fork escape it
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    return True
                if pid == 0:
                    break
                if job := self._jobs.pop(pid, None):
                    self._finish(dataclasses.replace(job, command=False), status)
            time.sleep(_STEP_S)
        return False


def _failure(request: int, error: OSError) -> dict[str, Any]:
    return {"id": request, "error": str(error), "errno": error.errno}


def _put(header: dict[str, Any], payload: bytes) -> Frame:
    files.write_all(header["entries"], payload)
    return {}, b""


def _get(header: dict[str, Any], _: bytes) -> Frame:
    return {}, files.read(header["path"], header["limit"])


def _tree(header: dict[str, Any], _: bytes) -> Frame:
    found = tree.Comparison(header["listed"], tree.Bounds(**header["bounds"]), header["ignored"])
    found.run(header["root"])
    answer = {
        "changed": found.changed,
        "missing": found.missing(header["root"]),
        "skipped": found.skipped,
        "oversize": found.oversize,
    }
    return answer, bytes(found.contents)


_FILES: dict[str, Callable[[dict[str, Any], bytes], Frame]] = {"put": _put, "get": _get, "tree": _tree}


def _write(data: bytes) -> None:
    """To the host, which always reads."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def main(uid: int, gid: int, lease_s: float, own: Sequence[str]) -> NoReturn:
    """Never returns."""
    try:
        for directory in own:
            os.chown(directory, uid, gid)
        Init(uid, gid, lease_s).serve()
    except BrokenPipeError:
        os._exit(0)
    except BaseException as error:
        sys.stderr.write(f"PID 1: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)

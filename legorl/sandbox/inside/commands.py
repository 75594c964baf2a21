"""Runs one command of the agent and ends whatever it leaves. In a process of its own, a keeper.

Invariant: as a subreaper the keeper adopts the command's orphans, so when it answers, the whole tree
is gone, whichever session its members moved to. It runs as the container's root, out of the agent's reach.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from legorl.sandbox import linux, seccomp
from legorl.sandbox.inside.kept import Kept
from legorl.sandbox.inside.processes import end_descendants

_CHUNK = 1 << 16
_END_S = 2.0
_PIPE_MAX = 1 << 20
_OOM_SCORE = "500"
"""Of commands: the kernel ends one of them before a process of ours."""


@dataclass(frozen=True)
class Command:
    """What to run."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    timeout_s: float
    output_bytes: int
    uid: int
    gid: int
    end_tree: bool = True
    """False in ablations: what the command leaves lives on."""
    filtered: bool = False
    """Also deny it the system calls that the engine's own profile may allow (Podman's: user namespaces)."""


def run(command: Command, stdin: bytes) -> tuple[dict[str, Any], bytes]:
    """The answer: `code`, `timed_out`, `seconds`, `tree_gone`, `sizes` of output and error, which follow.

    SIGTERM ends the command, as its deadline does.
    """
    start = time.monotonic()
    if command.end_tree:
        linux.set_child_subreaper()
    ended: list[int] = []
    wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda number, _: ended.append(number))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # an order to end that came before waits until here
    out, err, failure = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
    source = _input(stdin)
    child = os.fork()
    if child == 0:
        _become(command, (source, out[1], err[1]), failure[1])
    for fd in (source, out[1], err[1], failure[1]):
        os.close(fd)
    if reason := os.read(failure[0], 4096):
        os.waitpid(child, 0)
        return {"error": reason.decode(errors="replace")}, b""
    kept = {out[0]: Kept(command.output_bytes), err[0]: Kept(command.output_bytes)}
    status = _attend(child, start + command.timeout_s, kept, wake, ended)
    gone = end_descendants(_END_S) if command.end_tree else True
    for fd, output in kept.items():
        _drain(fd, output)
    texts = [output.contents() for output in kept.values()]
    header = {
        "code": 124 if status is None else _code(status),
        "timed_out": status is None,
        "seconds": time.monotonic() - start,
        "tree_gone": gone,
        "sizes": [len(text) for text in texts],
    }
    return header, b"".join(texts)


def _input(data: bytes) -> int:
    if not data:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    writer = os.memfd_create("stdin", os.MFD_CLOEXEC)
    with os.fdopen(writer, "wb") as stream:
        stream.write(data)
        stream.flush()
        return os.open(f"/proc/self/fd/{writer}", os.O_RDONLY | os.O_CLOEXEC)


def _become(command: Command, streams: tuple[int, int, int], failure: int) -> NoReturn:
    """Turn the forked child into the command."""
    try:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123
            score.write(_OOM_SCORE)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
        if command.uid != os.geteuid():
            os.setgroups([])
        os.setresgid(command.gid, command.gid, command.gid)
        os.setresuid(command.uid, command.uid, command.uid)
        if command.filtered and seccomp.supported():
            linux.drop_privileges()
            seccomp.deny_system_calls(namespaces=True)
        os.chdir(command.cwd)
        environment = {os.fsencode(name): os.fsencode(value) for name, value in command.env.items()}
        os.execvpe(command.argv[0], list(command.argv), environment)
    except OSError as error:
        os.write(failure, f"{command.argv[0]} in {command.cwd}: {error.strerror}".encode()[:4000])
    except BaseException as error:
        os.write(failure, repr(error).encode()[:4000])
    os._exit(127)


def _attend(child: int, end: float, kept: dict[int, Kept], wake: int, ended: list[int]) -> int | None:
    """Read what the command says until it ends; its wait status, None when it is out of time."""
    poll = select.poll()
    for fd in (*kept, wake):
        poll.register(fd, select.POLLIN)
    while True:
        while True:  # several deaths may come as one signal
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid == child:
                return status
            if pid == 0:
                break
        left = end - time.monotonic()
        if left <= 0 or signal.SIGTERM in ended:
            return None
        for fd, _ in poll.poll(left * 1000):
            if fd == wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            elif data := os.read(fd, _CHUNK):
                kept[fd].add(data)
            else:
                poll.unregister(fd)


def _drain(fd: int, output: Kept) -> None:
    """What the pipe still holds; waits for nothing."""
    os.set_blocking(fd, False)
    left = _PIPE_MAX
    with contextlib.suppress(BlockingIOError):
        while left > 0 and (data := os.read(fd, _CHUNK)):
            output.add(data)
            left -= len(data)
    os.close(fd)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code

"""Fork server of a Python harness: imports it once, then forks one agent per trial into the trial's sandbox.

    zygote ─ fork ─ entrant (joins the sandbox) ─ fork ─ keeper ─ fork ─ agent

Starts on the host and holds no secret: its environment is empty but for settings of the import, and its only
descriptor is the control socket, whose end-of-file ends it and every agent. An agent gets the state of a
command that the sandbox executes: namespaces, limits, no privileges, its own session, the environment of the
launch, no other descriptors than its standard streams. The keeper, which agents cannot trace, keeps the
deadline and ends the agent's whole tree; it answers on a socket of its own, whose end-of-file ends it too.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from legorl.sandbox.channel import encode, receive, send
from legorl.sandbox.join import Join, enter
from legorl.sandbox.linux import set_child_subreaper, set_dumpable, set_parent_death_signal

_END_TREE_S = 5.0
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


Run = Callable[[Sequence[str]], int]
"""Runs one agent on its configuration files and returns its exit code."""


def main(control_fd: int, runner: str) -> None:
    """Import the module `runner`, say hello, serve until the host closes its end."""
    control = socket.socket(fileno=control_fd)
    try:
        module = importlib.import_module(runner)
        module.warm_up()
    except Exception:
        send(control, encode({"error": traceback.format_exc()[-4000:]}))
        raise
    gc.collect()
    gc.freeze()  # the collector does not touch, and so not copy, what all agents share
    send(control, encode({}))
    with _child_events() as events:
        _serve(control, events, module.run)


def _serve(control: socket.socket, events: int, run: Run) -> None:
    poll = _poll(control.fileno(), events)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if events in ready:
            os.read(events, 4096)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        if control.fileno() in ready:
            received = receive(control)
            if received is None:
                return  # entrants, keepers and agents follow by their parent-death signals
            message, fds = received
            if os.fork() == 0:
                control.close()
                _entrant(message, socket.socket(fileno=fds[0]), fds[1:], run)
            for fd in fds:
                os.close(fd)


def _entrant(message: dict[str, Any], host: socket.socket, fds: list[int], run: Run) -> NoReturn:
    """Join the sandbox, fork the keeper into its process namespace, and wait for it."""
    try:
        join = Join(**message["join"])
        for limit in _LIMITS:
            resource.setrlimit(limit, resource.prlimit(join.init_pid, limit))
        enter(join)
        if os.fork() == 0:
            _keeper(message, host, fds, run)
        host.close()
        os.wait()
    except OSError as error:
        send(host, encode({"error": f"the sandbox could not be joined: {error}"}))
    finally:
        os._exit(0)


def _keeper(message: dict[str, Any], host: socket.socket, fds: list[int], run: Run) -> NoReturn:
    """Start the agent, wait for its end, the deadline or the host, end its tree, answer."""
    try:
        set_parent_death_signal(signal.SIGKILL)
        set_child_subreaper()
        os.setsid()
        with _child_events() as events:
            start = time.monotonic()
            child = os.fork()
            if child == 0:
                _agent(message, fds, run)
            code = _wait(child, start + message["timeout_s"], host, events)
            tree_gone = _end_tree()
            answer = {"code": code, "seconds": time.monotonic() - start, "tree_gone": tree_gone}
            send(host, encode(answer))
    finally:
        os._exit(0)


def _wait(child: int, end: float, host: socket.socket, events: int) -> int | None:
    """Exit code of the child (128+n for signal n); None when the deadline passed or the host went away."""
    poll = _poll(host.fileno(), events)
    while (left := end - time.monotonic()) > 0:
        ready = {fd for fd, _ in poll.poll(left * 1000)}
        if host.fileno() in ready:
            return None
        if events in ready:
            os.read(events, 4096)
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                if dead[0] == child:
                    code = os.waitstatus_to_exitcode(dead[1])
                    return 128 - code if code < 0 else code
    return None


def _end_tree() -> bool:
    """Kill and reap every descendant (their orphans come to this process); False when some are left."""
    end = time.monotonic() + _END_TREE_S
    children = f"/proc/self/task/{os.getpid()}/children"
    while time.monotonic() < end:
        with open(children) as stream:  # noqa: PTH123
            pids = [int(pid) for pid in stream.read().split()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, 0 if pids else os.WNOHANG)[0]:
                pids = []
        except ChildProcessError:
            return True
    return False


def _agent(message: dict[str, Any], fds: Sequence[int], run: Run) -> NoReturn:
    """Become what an executed command would be, then run the agent in this interpreter."""
    code = 1
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(len(fds), 1 << 16)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        set_dumpable(True)  # or its own /proc files belong to nobody
        set_parent_death_signal(signal.SIGKILL)
        with open("/proc/self/oom_score_adj", "w") as stream:  # noqa: PTH123
            stream.write("500")  # as the sandbox's commands: they go before what watches them
        os.environ.clear()
        os.environ.update(message["env"])
        code = run(message["specs"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def _child_events() -> Iterator[int]:
    """A descriptor that is readable after a child has died."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)


def _poll(*fds: int) -> select.poll:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll

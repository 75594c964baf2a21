"""The process that starts sandboxes: one per provider.

It stays small and single-threaded, so that a fork costs little whatever the provider's process has loaded,
and so that a parent-death signal means what it says. For each request it forks a supervisor
(`supervisor.py`), whose death ends its sandbox.

Invariant: when the provider's process ends in any way, so does the launcher, and before it ends every
supervisor is dead, every process of every sandbox is reaped and every control group is removed.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legorl.sandbox import cgroups, channel, linux, stage, supervisor
from legorl.sandbox.watch import Watch

_END_S = 10.0
_LEFTOVER_S = 0.02


@dataclass
class Launcher:
    """State of the launcher process."""

    control: socket.socket
    parent: int
    """Pid of the provider's process."""
    failure: str
    """Why no sandbox can be started here; empty when they can."""
    running: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Supervisor pid -> the request it serves."""
    leftover: list[str] = field(default_factory=list)
    """Control groups whose last processes are still going."""

    def serve(self) -> None:
        """Until the provider is gone."""
        with Watch(self.control) as watch:
            while os.getppid() == self.parent:
                message = watch.wait(_LEFTOVER_S if self.leftover else None)
                self._reap()
                if not message:
                    continue
                received = channel.receive(self.control)
                if received is None:
                    break
                request, fds = received
                if "kill" not in request:
                    self._start(request, fds, watch)
                else:
                    self._kill(request["kill"])
            self._end()

    def _start(self, request: dict[str, Any], fds: list[int], watch: Watch) -> None:
        with socket.socket(fileno=fds[0]) as theirs:
            if self.failure:
                channel.send(theirs, channel.encode({"error": self.failure}))
                return
            pid = os.fork()
            if pid == 0:
                watch.close()
                self.control.close()
                if request.get("op") == "image":
                    from legorl.sandbox import lazy_server  # what it imports would slow down every start

                    lazy_server.main(request, theirs)
                supervisor.main(request, theirs)
        self.running[pid] = request

    def _kill(self, serial: int) -> None:
        """End the supervisor of that request, if it still runs."""
        for pid, request in self.running.items():
            if request["serial"] == serial:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self.running:
                request = self.running.pop(pid)
                self.leftover += [group["directory"] for group in request.get("groups", ())]
                if request.get("op") == "image":
                    stage.unmount_image(request["serial"])
            self._kill_adopted()
        self.leftover = [directory for directory in self.leftover if not cgroups.remove(Path(directory), 0)]

    def _kill_adopted(self) -> None:
        """Kill what a dead supervisor left: a bubblewrap that had not yet asked for a parent-death signal."""
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if int(child) not in self.running:
                os.kill(int(child), signal.SIGKILL)

    def _end(self) -> None:
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)  # bubblewrap and its init follow by their parent-death signals
        end = time.monotonic() + _END_S
        while time.monotonic() < end:
            self._reap()
            if not self.leftover and not self.running:
                try:
                    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                except ChildProcessError:
                    return
            time.sleep(0.002)


def main(fd: int, parent: int) -> None:
    """Entry point: `fd` is the control socket, `parent` the provider's pid."""
    linux.set_parent_death_signal(signal.SIGTERM)
    linux.set_child_subreaper()
    os.set_inheritable(fd, False)
    failure = ""
    try:
        if os.geteuid() == 0:
            os.setgroups([])
        else:
            _become_namespace_root()
        stage.prepare()
    except (OSError, stage.StageError) as error:
        failure = str(error)
    gc.disable()
    gc.freeze()
    Launcher(socket.socket(fileno=fd), parent, failure).serve()


def _become_namespace_root() -> None:
    """Without privileges: a user namespace in which this process may mount."""
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    for name, value in (("uid_map", f"0 {uid} 1"), ("setgroups", "deny"), ("gid_map", f"0 {gid} 1")):
        Path("/proc/self", name).write_text(value)

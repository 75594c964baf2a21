"""Sandboxes on this machine: bubblewrap, an overlay on a tmpfs, one network namespace each.

    provider ─ socket ─ launcher ─ fork ─ supervisor ─ bubblewrap ─ init
                                              └─ keepers ─ commands

The supervisor (outside the process namespace, inside all others) answers this module's requests; see there.
A process of another program that wants to join a sandbox uses `LocalSandbox.join`.

Invariants: no thread and no asyncio child watcher per sandbox; the task's directory is never written to;
nothing is written to a disk, so nothing is left on one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import legorl
from legorl.errors import IntegrityError, SandboxExecError, SandboxStartError, TransferError, UserError
from legorl.sandbox import cgroups, channel, layout, seccomp
from legorl.sandbox.base import (
    PROXY_PORT,
    WORKDIR,
    ExecResult,
    Limits,
    Phase,
    ProxyEndpoint,
    Sandbox,
    SandboxSpec,
    Snapshot,
)
from legorl.sandbox.capture import Capture, sealed_input
from legorl.sandbox.join import Join
from legorl.sandbox.keepers import Keepers
from legorl.sandbox.link import Link, LinkClosedError
from legorl.sandbox.snapshot import take_snapshot

_GRACE_S = 10.0
"""A deadline that the supervisor enforces is given up on this much later."""
_LAUNCH = (
    "import sys; sys.path.insert(0, sys.argv[1]); from legorl.sandbox.launcher import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)


def check_host() -> str:
    """Path of bubblewrap.

    Raises:
        UserError: something is missing on this machine; the message names the package or setting.
    """
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise UserError("bubblewrap is missing (no `bwrap` on PATH): `apt-get install bubblewrap`.")
    if "overlay" not in Path("/proc/filesystems").read_text().split():
        raise UserError("The kernel has no overlayfs: `modprobe overlay`.")
    spaces = Path("/proc/sys/user/max_user_namespaces")
    if not spaces.exists() or int(spaces.read_text()) == 0:
        raise UserError("User namespaces are switched off: `sysctl user.max_user_namespaces=65536`.")
    if not seccomp.supported():
        raise UserError(
            f"Local sandboxes know the system calls of x86_64 and aarch64, not {platform.machine()}."
        )
    return bubblewrap


class LocalProvider:
    """Starts sandboxes on this machine.

    Call it from one event loop. Construction raises `UserError` where the machine lacks something.
    """

    name = "local"

    def __init__(self, *, transfer_timeout_s: float = 30.0) -> None:
        self._bubblewrap = check_host()
        self._hierarchy = cgroups.find()
        if self._hierarchy is not None:
            self._hierarchy.reap()
        self._transfer_timeout_s = transfer_timeout_s
        self._launcher: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._serial = itertools.count(1)
        self._running: set[LocalSandbox] = set()

    @property
    def limits_by(self) -> str:
        """What enforces memory and process limits: `cgroup v1`, `cgroup v2` or `rlimit`."""
        return f"cgroup v{self._hierarchy.version}" if self._hierarchy else "rlimit"

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """See `SandboxProvider`."""
        return await self.start_local(spec)

    async def start_local(self, spec: SandboxSpec) -> LocalSandbox:
        """As `start`, typed."""
        for path in (spec.workspace, *(item.source for item in spec.mounts)):
            if not path.exists():
                raise SandboxStartError(f"{spec.trial_id}: {path} does not exist on the host.")
        ours, theirs = channel.pair()
        link = Link(ours)
        try:
            with theirs:
                groups = self._request(spec, theirs.fileno())
            message, fds = await asyncio.wait_for(link.hello(), spec.start_timeout_s)
        except TimeoutError:
            await link.close()
            raise SandboxStartError(
                f"{spec.trial_id}: not started after {spec.start_timeout_s} s; raise sandbox.start_timeout_s "
                "or lower sandbox.concurrency."
            ) from None
        except LinkClosedError as error:
            await link.close()
            raise SandboxStartError(f"{spec.trial_id}: the launcher died.") from error
        except BaseException:
            await link.close()
            raise
        if "error" in message:
            await link.close()
            raise SandboxStartError(f"{spec.trial_id}: {message['error']}")
        sandbox = LocalSandbox(self, spec, link, hello=message, upper=fds[0], groups=groups)
        self._running.add(sandbox)
        return sandbox

    def _request(self, spec: SandboxSpec, control: int) -> tuple[str, ...]:
        """Ask the launcher for a sandbox; returns the directories of its control groups."""
        launcher, sock = self._ensure_launcher()
        groups: list[cgroups.Group] = []
        if self._hierarchy is not None:
            name = cgroups.group_name(launcher.pid, next(self._serial))
            groups = self._hierarchy.groups(name, spec.limits)
        request = {
            "launcher": launcher.pid,
            "privileged": os.geteuid() == 0,
            "groups": [{"directory": group.directory, "files": dict(group.files)} for group in groups],
            "workspace": str(spec.workspace.resolve()),
            "rlimits": self._rlimits(spec.limits),
            "disk_mb": spec.limits.disk_mb,
            "bwrap": self._bubblewrap,
            "arguments": layout.bubblewrap_arguments(spec),
            "timeout_s": spec.start_timeout_s,
        }
        try:
            channel.send(sock, channel.encode(request), [control])
        except OSError as error:
            raise SandboxStartError(f"{spec.trial_id}: the launcher does not listen: {error}.") from error
        return tuple(group.directory for group in groups)

    def _rlimits(self, limits: Limits) -> dict[str, int]:
        rlimits = {"RLIMIT_CORE": 0}
        if self._hierarchy is None:
            rlimits |= {"RLIMIT_DATA": limits.memory_mb << 20, "RLIMIT_NPROC": limits.pids}
        return rlimits

    def kill(self, supervisor: int) -> None:
        """End a sandbox whose supervisor does not answer."""
        if self._launcher is not None:
            with contextlib.suppress(OSError):
                channel.send(self._launcher[1], channel.encode({"kill": supervisor}))

    def _ensure_launcher(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._launcher is not None:
            if self._launcher[0].poll() is None:
                return self._launcher
            self._launcher[1].close()
        ours, theirs = channel.pair()
        with theirs:
            command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _LAUNCH]
            arguments = [str(Path(legorl.__file__).parents[1]), str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the provider's to handle
            )
        self._launcher = process, ours
        return self._launcher

    def forget(self, sandbox: LocalSandbox) -> None:
        """Called by a sandbox that has stopped."""
        self._running.discard(sandbox)

    async def close(self) -> None:
        """See `SandboxProvider`."""
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._running)))
        if self._launcher is None:
            return
        (process, control), self._launcher = self._launcher, None
        control.close()
        try:
            await asyncio.to_thread(process.wait, _GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(1)


class LocalSandbox:
    """A running sandbox of `LocalProvider`."""

    def __init__(
        self,
        provider: LocalProvider,
        spec: SandboxSpec,
        link: Link,
        *,
        hello: Mapping[str, int],
        upper: int,
        groups: tuple[str, ...],
    ) -> None:
        self._provider = provider
        self._spec = spec
        self._link = link
        self._keepers = Keepers(link)
        self._init_pid = hello["init_pid"]
        self._supervisor_pid = hello["supervisor_pid"]
        self._upper = upper
        self._groups = groups
        self._phase = Phase.SETUP
        self._proxy: ProxyEndpoint | None = None
        self._listener: socket.socket | None = None
        self._stopped = False

    @property
    def init_pid(self) -> int | None:
        """See `Sandbox`."""
        return self._init_pid

    @property
    def join(self) -> Join:
        """What a process needs to know to join this sandbox (`legorl.sandbox.join`)."""
        return Join(self._init_pid, self.joined_env(), WORKDIR, self._groups)

    def joined_env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment that `exec` would give a command."""
        return layout.environment({**self._spec.env, **(extra or {})})

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKDIR,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `Sandbox`."""
        message = {
            "op": "exec",
            "argv": list(argv),
            "env": self.joined_env(env),
            "cwd": cwd,
            "timeout_s": timeout_s,
        }
        limit = self._spec.limits.output_bytes
        with Capture(limit) as out, Capture(limit) as err, sealed_input(stdin) as source:
            try:
                answer = await self._keepers.run(message, [source, out.writer, err.writer], timeout_s)
            except (LinkClosedError, TimeoutError, channel.MessageTooLargeError) as error:
                raise SandboxExecError(f"{self._spec.trial_id}: {argv[0]}: {error}") from error
            if "error" in answer:
                raise SandboxExecError(f"{self._spec.trial_id}: {answer['error']}")
            return ExecResult(
                answer["code"], out.contents(), err.contents(), answer["seconds"], answer["timed_out"]
            )

    async def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See `Sandbox`."""
        await self.put_many({path: (data, mode)})

    async def put_many(self, files: Mapping[str, tuple[bytes, int]]) -> None:
        """Write files: absolute path -> contents and mode (a symbolic link's contents are its target).

        Each is replaced atomically; links in its place are not followed. Raises `TransferError`.
        """
        entries = [(path, mode, len(data)) for path, (data, mode) in files.items()]
        with sealed_input(b"".join(data for data, _ in files.values())) as source:
            await self._transfer({"op": "put", "files": entries}, [source], ", ".join(files))

    async def get(self, path: str) -> bytes:
        """See `Sandbox`."""
        _, fds = await self._transfer({"op": "get", "path": path}, [], path)
        limit = (self._spec.limits.disk_mb) << 20
        with os.fdopen(fds[0], "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                raise TransferError(
                    f"{self._spec.trial_id}: {path} has {size} bytes; at most {limit} are read."
                )
            return stream.read(limit)

    async def _transfer(
        self, message: dict[str, Any], fds: list[int], what: str
    ) -> tuple[dict[str, Any], list[int]]:
        try:
            answer, received = await self._link.request(
                message, fds, timeout_s=self._provider._transfer_timeout_s
            )
        except (LinkClosedError, TimeoutError, channel.MessageTooLargeError) as error:
            raise TransferError(f"{self._spec.trial_id}: {what}: {error}") from error
        if answer.get("errno") == 28:
            raise TransferError(
                f"{self._spec.trial_id}: {what}: the sandbox's disk is full "
                f"({self._spec.limits.disk_mb} MB; raise sandbox.disk_mb)."
            )
        if "error" in answer:
            raise TransferError(f"{self._spec.trial_id}: {what}: {answer['error']}")
        return answer, received

    async def connect_proxy(self, proxy: ProxyEndpoint) -> str:
        """See `Sandbox`. Reachable in the agent phase only; entering that phase later is fine."""
        if self._phase is Phase.VERIFY:
            raise IntegrityError(f"{self._spec.trial_id}: no proxy in the verify phase.")
        self._proxy = proxy
        if self._phase is Phase.AGENT:
            await self._attach()
        return f"http://127.0.0.1:{PROXY_PORT}"

    async def set_phase(self, phase: Phase) -> None:
        """See `Sandbox`. No process of the phase before survives."""
        if self._phase is phase:
            return
        await self._kill_all()
        if self._phase is Phase.AGENT:
            await self._detach()
        self._phase = phase
        if phase is Phase.AGENT and self._proxy is not None:
            await self._attach()

    async def _kill_all(self) -> None:
        try:
            alone = await self._keepers.end_everything()
        except (LinkClosedError, TimeoutError) as error:
            raise IntegrityError(f"{self._spec.trial_id}: processes could not be ended: {error}") from error
        if not alone:
            raise IntegrityError(f"{self._spec.trial_id}: processes survived being killed.")

    async def _attach(self) -> None:
        assert self._proxy is not None
        if self._listener is not None:
            return
        try:
            answer, fds = await self._link.request(
                {"op": "listen", "port": PROXY_PORT}, [], timeout_s=_GRACE_S
            )
        except (LinkClosedError, TimeoutError) as error:
            raise IntegrityError(f"{self._spec.trial_id}: no socket for the proxy: {error}") from error
        if "error" in answer:
            raise IntegrityError(f"{self._spec.trial_id}: no socket for the proxy: {answer['error']}")
        self._listener = socket.socket(fileno=fds[0])
        self._listener.setblocking(False)
        await self._proxy.attach(self._listener)

    async def _detach(self) -> None:
        if self._listener is not None and self._proxy is not None:
            listener, self._listener = self._listener, None
            await self._proxy.detach(listener)
            listener.close()

    async def snapshot(self) -> Snapshot:
        """See `Sandbox`. Read from the overlay's upper layer, which no process in the sandbox can name."""
        if self._stopped:
            raise TransferError(f"{self._spec.trial_id}: the sandbox was stopped.")
        attribute = layout.opaque_attribute(privileged=os.geteuid() == 0)
        return await asyncio.to_thread(take_snapshot, self._upper, self._spec.workspace, attribute)

    async def stop(self) -> None:
        """See `Sandbox`."""
        if self._stopped:
            return
        self._stopped = True
        try:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._detach(), _GRACE_S)
        finally:
            os.close(self._upper)
            self._provider.forget(self)
            self._keepers.close()
            if not await self._link.close():
                self._provider.kill(self._supervisor_pid)

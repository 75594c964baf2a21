"""A running sandbox whose processes are below our own PID 1: the host's side, whoever carries the stream."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import signal
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from legorl.errors import IntegrityError, SandboxExecError, SandboxStartError, TransferError
from legorl.sandbox.base import (
    PROXY_PORT,
    WORKDIR,
    ExecResult,
    Phase,
    ProxyEndpoint,
    SandboxSpec,
    Snapshot,
)
from legorl.sandbox.hostenv import host_environment
from legorl.sandbox.inside.frames import Frame
from legorl.sandbox.inside_link import Requests
from legorl.sandbox.link import LinkClosedError
from legorl.sandbox.policy import Policy
from legorl.sandbox.pristine import Pristine
from legorl.sandbox.snapshot import BOUNDS, IGNORED, compared
from legorl.sandbox.tunnels import ProxyTunnels

_GRACE_S = 20.0
"""PID 1 keeps a command's deadline; it is given up on this much later."""
_END_S = 15.0
_PROXY_S = 10.0
_MAX_STDIN = 512 << 20


class ContainedSandbox:
    """See `Sandbox`. Made by a provider's `start`."""

    def __init__(
        self,
        spec: SandboxSpec,
        link: Requests,
        policy: Policy,
        *,
        env: Mapping[str, str],
        transfer_timeout_s: float,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self._spec = spec
        self._link = link
        self._ends_processes = policy.holds("processes_ended")
        self._closes_network = policy.holds("network_closed")
        # In the host's network every sandbox has the same loopback.
        self._port = PROXY_PORT if self._closes_network else random.randrange(20_000, 32_000)
        self._defaults = {**env, **({} if policy.holds("no_credentials") else host_environment())}
        """Variables that the image's own take precedence over."""
        self._transfer_timeout_s = transfer_timeout_s
        self._end = end
        self._pristine = Pristine(spec.workspace)
        self._phase = Phase.SETUP
        self._proxy: ProxyEndpoint | None = None
        self._tunnels: ProxyTunnels | None = None
        self._stopped: asyncio.Task[None] | None = None

    @property
    def init_pid(self) -> int | None:
        """See `Sandbox`. The engine may be on another machine."""
        return None

    async def fill(self) -> None:
        """Copy the work tree in. Raises `SandboxStartError`."""
        batches = self._pristine.batches(WORKDIR)
        try:
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                await self._transfer({"op": "put", "entries": batch[0]}, batch[1], "the work tree")
        except (OSError, TransferError) as error:
            raise SandboxStartError(self._about(f"the work tree could not be copied: {error}")) from error

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
        request = {
            "op": "exec",
            "argv": list(argv),
            "defaults": self._defaults,
            "env": {**self._spec.env, **(env or {})},
            "cwd": cwd,
            "timeout_s": timeout_s,
            "output_bytes": self._spec.limits.output_bytes,
            "end_tree": self._ends_processes,
        }
        if len(stdin) > _MAX_STDIN:
            raise SandboxExecError(self._about(f"{argv[0]}: {len(stdin)} bytes of input are too many."))
        try:
            answer, output = await self._link.request(request, stdin, timeout_s=timeout_s + _GRACE_S)
        except (LinkClosedError, TimeoutError) as error:
            raise SandboxExecError(self._about(f"{argv[0]}: {error}")) from error
        if "error" in answer:
            raise SandboxExecError(self._about(answer["error"]))
        if "killed" in answer:
            if not answer["alone"]:
                raise SandboxExecError(self._about(f"{argv[0]}: processes survived being killed."))
            return ExecResult(128 + signal.SIGKILL, b"", b"", 0.0)
        if not answer["tree_gone"]:
            await self._end_processes(SandboxExecError)
        size = answer["sizes"][0]
        return ExecResult(
            answer["code"], output[:size], output[size:], answer["seconds"], answer["timed_out"]
        )

    async def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See `Sandbox`."""
        await self.put_many({path: (data, mode)})

    async def put_many(self, files: Mapping[str, tuple[bytes, int]]) -> None:
        """Write files: absolute path -> contents and mode (a symbolic link's contents are its target).

        Each is replaced atomically; links in its place are not followed. Raises `TransferError`.
        """
        entries = [
            (path, mode if stat.S_IFMT(mode) else mode | stat.S_IFREG, len(data), None)
            for path, (data, mode) in files.items()
        ]
        contents = b"".join(data for data, _ in files.values())
        await self._transfer({"op": "put", "entries": entries}, contents, f"{len(files)} file(s) to put")

    async def get(self, path: str) -> bytes:
        """See `Sandbox`."""
        limit = self._spec.limits.disk_mb << 20
        _, data = await self._transfer({"op": "get", "path": path, "limit": limit}, b"", path)
        return data

    async def _transfer(self, request: dict[str, Any], payload: bytes, what: str) -> Frame:
        try:
            answer, data = await self._link.request(request, payload, timeout_s=self._transfer_timeout_s)
        except (LinkClosedError, TimeoutError) as error:
            raise TransferError(self._about(f"{what}: {error}")) from error
        if answer.get("errno") == errno.ENOSPC:
            size = self._spec.limits.disk_mb
            raise TransferError(self._about(f"{what}: the disk of {size} MB is full; raise sandbox.disk_mb."))
        if "error" in answer:
            raise TransferError(self._about(f"{what}: {answer['error']}"))
        if "killed" in answer:
            raise TransferError(self._about(f"{what}: out of memory; raise sandbox.memory_mb."))
        return answer, data

    async def connect_proxy(self, proxy: ProxyEndpoint) -> str:
        """See `Sandbox`. Reachable in the agent phase only; that phase may also be entered later."""
        if self._phase is Phase.VERIFY:
            raise IntegrityError(self._about("no proxy in the verify phase."))
        self._proxy = proxy
        if self._phase is Phase.AGENT:
            await self._attach(proxy)
        return f"http://127.0.0.1:{self._port}"

    async def set_phase(self, phase: Phase) -> None:
        """See `Sandbox`. No process of the phase before survives."""
        if self._phase is phase:
            return
        if self._ends_processes:
            await self._end_processes(IntegrityError)
        if self._closes_network:
            await self._detach()
        self._phase = phase
        if phase is Phase.AGENT and self._proxy is not None:
            await self._attach(self._proxy)

    async def _end_processes(self, failure: type[IntegrityError] | type[SandboxExecError]) -> None:
        try:
            answer, _ = await self._link.request({"op": "end"}, timeout_s=_END_S)
        except (LinkClosedError, TimeoutError) as error:
            raise failure(self._about(f"processes could not be ended: {error}")) from error
        if not answer["alone"]:
            raise failure(self._about("processes survived being killed."))

    async def _attach(self, proxy: ProxyEndpoint) -> None:
        if self._tunnels is not None:
            return
        self._tunnels = ProxyTunnels(self._link, proxy)
        try:
            await self._tunnels.open()
            answer, _ = await self._link.request({"op": "listen", "port": self._port}, timeout_s=_PROXY_S)
        except (OSError, LinkClosedError, TimeoutError) as error:
            raise IntegrityError(self._about(f"no port for the proxy: {error}")) from error
        if "error" in answer:
            raise IntegrityError(self._about(f"no port for the proxy: {answer['error']}"))

    async def _detach(self) -> None:
        if self._tunnels is None:
            return
        tunnels, self._tunnels = self._tunnels, None
        try:
            await self._link.request({"op": "mute"}, timeout_s=_PROXY_S)
        except (LinkClosedError, TimeoutError) as error:
            raise IntegrityError(self._about(f"the proxy's port could not be closed: {error}")) from error
        finally:
            await tunnels.close()

    async def snapshot(self) -> Snapshot:
        """See `Sandbox`. PID 1 reads the tree: the agent cannot touch it, nor make it read without end."""
        request = {
            "op": "tree",
            "root": WORKDIR,
            "listed": self._pristine.listed,
            "bounds": BOUNDS,
            "ignored": IGNORED,
        }
        answer, contents = await self._transfer(request, b"", "the work tree")
        return await asyncio.to_thread(compared, self._spec.workspace, answer, contents)

    async def stop(self) -> None:
        """See `Sandbox`."""
        if self._stopped is None:
            self._stopped = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopped)

    async def _stop(self) -> None:
        try:
            # Whatever the proxy says, the sandbox ends.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._detach(), _PROXY_S)
        finally:
            await self._link.close()
            await self._end()

    def _about(self, message: str) -> str:
        return f"{self._spec.trial_id}: {message}"

"""One running sandbox of `KubernetesProvider`: the provider's side of a pod's guard."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from legorl.errors import IntegrityError, SandboxExecError, TransferError
from legorl.sandbox.base import (
    PROXY_PORT,
    WORKDIR,
    ExecResult,
    Phase,
    ProxyEndpoint,
    SandboxSpec,
    Snapshot,
)
from legorl.sandbox.kubernetes_link import GuardError, LinkLostError, PodLink, Reply
from legorl.sandbox.pod_wire import WireError

_GRACE_S = 10.0
"""What a request may take beyond the deadline that the guard keeps."""
_PHASE_S = 30.0
_STOP_S = 10.0
_FAILURES = (GuardError, LinkLostError, TimeoutError, WireError)


class KubernetesSandbox:
    """See `Sandbox`. Made by `KubernetesProvider.start`."""

    def __init__(
        self,
        spec: SandboxSpec,
        pod: str,
        link: PodLink,
        *,
        listen: Callable[[], tuple[socket.socket, str]],
        transfer_timeout_s: float,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self.pod = pod
        """Name of the pod."""
        self._spec, self._link, self._listen, self._end = spec, link, listen, end
        self._transfer_timeout_s = transfer_timeout_s
        self._phase = Phase.SETUP
        self._proxy: ProxyEndpoint | None = None
        self._listener: socket.socket | None = None
        self._stopped = False

    @property
    def init_pid(self) -> int | None:
        """See `Sandbox`: it is on another machine."""
        return None

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
            "env": dict(env or {}),
            "cwd": cwd,
            "timeout_s": timeout_s,
        }
        try:
            reply = await self._link.request(message, stdin, timeout_s=timeout_s + 2 * _GRACE_S)
        except _FAILURES as error:
            raise SandboxExecError(self._about(f"{argv[0]}: {error}")) from error
        ending, body = reply.message, reply.body
        return ExecResult(
            ending["code"], bytes(body.data), bytes(body.more), ending["seconds"], ending["timed_out"]
        )

    async def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See `Sandbox`."""
        await self.put_many({path: (data, mode)})

    async def put_many(self, files: Mapping[str, tuple[bytes, int]]) -> None:
        """Write files: absolute path -> contents and mode (a symbolic link's contents are its target).

        Each is replaced atomically; links in its place are not followed. Raises `TransferError`.
        """
        entries = [(path, mode, len(data)) for path, (data, mode) in files.items()]
        await self._transfer(
            {"op": "put", "files": entries},
            f"{len(files)} file(s) to put",
            b"".join(data for data, _ in files.values()),
        )

    async def get(self, path: str) -> bytes:
        """See `Sandbox`."""
        return bytes((await self._transfer({"op": "get", "path": path}, path)).body.data)

    async def _transfer(self, message: dict[str, Any], what: str, data: bytes = b"") -> Reply:
        try:
            return await self._link.request(message, data, timeout_s=self._transfer_timeout_s + _GRACE_S)
        except GuardError as error:
            raise TransferError(str(error)) from error
        except _FAILURES as error:
            raise TransferError(self._about(f"{what}: {error}")) from error

    async def connect_proxy(self, proxy: ProxyEndpoint) -> str:
        """See `Sandbox`. Reachable in the agent phase only; that phase may also be entered later."""
        if self._phase is Phase.VERIFY:
            raise IntegrityError(self._about("no proxy in the verify phase."))
        self._proxy = proxy
        return await self._enter(self._phase) or f"http://127.0.0.1:{PROXY_PORT}"

    async def set_phase(self, phase: Phase) -> None:
        """See `Sandbox`. No process of the phase before survives."""
        if self._phase is not phase:
            await self._enter(phase)
            self._phase = phase

    async def _enter(self, phase: Phase) -> str:
        """Have the guard enter a phase; the URL of the proxy, if one was connected just now."""
        address: tuple[str, int] | None = None
        if self._proxy is not None and phase is not Phase.VERIFY:
            address = await self._serve_proxy(self._proxy)
        message = {"op": "phase", "phase": phase.value, "proxy": address}
        try:
            reply = await self._link.request(message, timeout_s=_PHASE_S)
        except _FAILURES as error:
            raise IntegrityError(self._about(f"phase {phase.value}: {error}")) from error
        if phase is Phase.VERIFY:
            await self._detach()
        return str(reply.message["url"])

    async def _serve_proxy(self, proxy: ProxyEndpoint) -> tuple[str, int]:
        """Have the proxy listen where the guard's relay can reach it."""
        if self._listener is None:
            try:
                self._listener, self._host = self._listen()
            except OSError as error:
                raise IntegrityError(
                    self._about(f"no socket for the proxy on sandbox.kubernetes.proxy_host: {error}")
                ) from error
            await proxy.attach(self._listener)
        return self._host, self._listener.getsockname()[1]

    async def _detach(self) -> None:
        if self._listener is not None and self._proxy is not None:
            listener, self._listener = self._listener, None
            try:
                await self._proxy.detach(listener)
            finally:
                listener.close()

    async def snapshot(self) -> Snapshot:
        """See `Sandbox`. Read by the guard from the overlay's upper layer, which no command can name."""
        reply = await self._transfer({"op": "snapshot"}, "snapshot")
        changed: dict[str, bytes | None] = {}
        modes: dict[str, int] = {}
        start, data = 0, bytes(reply.body.data)
        for path, size, mode in reply.message["files"]:
            changed[path] = None if size is None else data[start : start + size]
            start += size or 0
            if size is not None:
                modes[path] = mode
        patch = reply.body.more.decode()
        return Snapshot(changed, modes, patch, tuple(reply.message["skipped"]))

    async def stop(self) -> None:
        """See `Sandbox`."""
        if self._stopped:
            return
        self._stopped = True
        try:
            # Whatever the proxy or the guard say, the sandbox ends.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._detach(), _STOP_S)
            with contextlib.suppress(*_FAILURES):
                await self._link.request({"op": "stop"}, timeout_s=_STOP_S)
        finally:
            try:
                await self._link.close()
            finally:
                await self._end()

    def _about(self, message: str) -> str:
        return f"{self._spec.trial_id} (pod {self.pod}): {message}"

"""One running sandbox of `LocalProvider`: the host's side."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from legorl.errors import IntegrityError, SandboxExecError, TransferError
from legorl.sandbox import channel, layout
from legorl.sandbox.base import (
    PROXY_PORT,
    WORKDIR,
    ExecResult,
    Phase,
    ProxyEndpoint,
    Rules,
    SandboxSpec,
    Snapshot,
)
from legorl.sandbox.capture import Capture, sealed_input
from legorl.sandbox.join import Join
from legorl.sandbox.keepers import Keepers
from legorl.sandbox.lazy import LazyImage
from legorl.sandbox.link import Link, LinkClosedError
from legorl.sandbox.local_image import LocalImage
from legorl.sandbox.snapshot import take_snapshot

_PROXY_S = 10.0


class LocalSandbox:
    """See `Sandbox`. Made by `LocalProvider.start`."""

    def __init__(
        self,
        spec: SandboxSpec,
        link: Link,
        *,
        init_pid: int,
        upper: int,
        groups: tuple[str, ...],
        policy: Rules,
        transfer_timeout_s: float,
        image: LazyImage | LocalImage | None,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self._spec = spec
        self._link = link
        self._keepers = Keepers(link)
        self._init_pid = init_pid
        self._upper = upper
        self._groups = groups
        self._policy = policy
        self._transfer_timeout_s = transfer_timeout_s
        self._image = image
        self._end = end
        self._phase = Phase.SETUP
        self._proxy: ProxyEndpoint | None = None
        self._listener: socket.socket | None = None
        self._reserved: socket.socket | None = None
        """On the host's loopback, until the agent phase; only with the rule `network_closed` off."""
        self._stopped = False

    @property
    def init_pid(self) -> int | None:
        """See `Sandbox`."""
        return self._init_pid

    @property
    def join(self) -> Join:
        """What a process needs to know to join this sandbox (`legorl.sandbox.join`)."""
        return Join(
            self._init_pid,
            self.joined_env(),
            WORKDIR,
            self._groups,
            own_network=self._policy.holds("network_closed"),
            privileged=not self._policy.holds("no_privileges"),
        )

    def joined_env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment that `exec` gives a command."""
        own = {} if self._image is None else self._image.env
        return layout.environment({**own, **self._spec.env, **(extra or {})}, image=self._image is not None)

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
            "inherit_env": not self._policy.holds("no_credentials"),
            "end_tree": self._policy.holds("processes_ended"),
        }
        limit = self._spec.limits.output_bytes
        with Capture(limit) as out, Capture(limit) as err, sealed_input(stdin) as source:
            try:
                answer = await self._keepers.run(message, [source, out.writer, err.writer], timeout_s)
            except (LinkClosedError, TimeoutError, channel.MessageTooLargeError) as error:
                self._check_image()
                raise SandboxExecError(self._about(f"{argv[0]}: {error}")) from error
            self._check_image()
            if "error" in answer:
                raise SandboxExecError(self._about(answer["error"]))
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
            await self._transfer({"op": "put", "files": entries}, [source], f"{len(files)} file(s) to put")

    async def get(self, path: str) -> bytes:
        """See `Sandbox`."""
        _, fds = await self._transfer({"op": "get", "path": path}, [], path)
        limit = self._spec.limits.disk_mb << 20
        with os.fdopen(fds[0], "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                raise TransferError(self._about(f"{path} has {size} bytes; at most {limit} are read."))
            return stream.read(limit)

    async def _transfer(
        self, message: dict[str, Any], fds: list[int], what: str
    ) -> tuple[dict[str, Any], list[int]]:
        try:
            answer, received = await self._link.request(message, fds, timeout_s=self._transfer_timeout_s)
        except (LinkClosedError, TimeoutError, channel.MessageTooLargeError) as error:
            self._check_image()
            raise TransferError(self._about(f"{what}: {error}")) from error
        self._check_image()
        if answer.get("errno") == errno.ENOSPC:
            size = self._spec.limits.disk_mb
            raise TransferError(self._about(f"{what}: the disk of {size} MB is full; raise sandbox.disk_mb."))
        if "error" in answer:
            raise TransferError(self._about(f"{what}: {answer['error']}"))
        return answer, received

    def _check_image(self) -> None:
        """What failed because the image could be read no more is told as that."""
        if self._image is not None:
            self._image.check()

    async def connect_proxy(self, proxy: ProxyEndpoint) -> str:
        """See `Sandbox`. Reachable in the agent phase only; that phase may also be entered later."""
        if self._phase is Phase.VERIFY:
            raise IntegrityError(self._about("no proxy in the verify phase."))
        self._proxy = proxy
        port = PROXY_PORT
        if not self._policy.holds("network_closed"):  # every such sandbox is on the host's one loopback
            self._reserved = socket.create_server(("127.0.0.1", 0))
            port = self._reserved.getsockname()[1]
        if self._phase is Phase.AGENT:
            await self._attach(proxy)
        return f"http://127.0.0.1:{port}"

    async def set_phase(self, phase: Phase) -> None:
        """See `Sandbox`. No process of the phase before survives."""
        if self._phase is phase:
            return
        if self._policy.holds("processes_ended"):
            await self._end_processes()
        await self._detach()
        self._phase = phase
        if phase is Phase.AGENT and self._proxy is not None:
            await self._attach(self._proxy)

    async def _end_processes(self) -> None:
        try:
            alone = await self._keepers.end_everything()
        except (LinkClosedError, TimeoutError) as error:
            raise IntegrityError(self._about(f"processes could not be ended: {error}")) from error
        if not alone:
            raise IntegrityError(self._about("processes survived being killed."))

    async def _attach(self, proxy: ProxyEndpoint) -> None:
        if self._listener is not None:
            return
        if self._reserved is not None:
            self._listener, self._reserved = self._reserved, None
        else:
            self._listener = await self._listen()
        self._listener.setblocking(False)
        await proxy.attach(self._listener)

    async def _listen(self) -> socket.socket:
        """A socket of the sandbox's own loopback."""
        try:
            answer, fds = await self._link.request(
                {"op": "listen", "port": PROXY_PORT}, [], timeout_s=_PROXY_S
            )
        except (LinkClosedError, TimeoutError) as error:
            raise IntegrityError(self._about(f"no socket for the proxy: {error}")) from error
        if "error" in answer:
            raise IntegrityError(self._about(f"no socket for the proxy: {answer['error']}"))
        return socket.socket(fileno=fds[0])

    async def _detach(self) -> None:
        if self._listener is not None and self._proxy is not None:
            listener, self._listener = self._listener, None
            try:
                await self._proxy.detach(listener)
            finally:
                listener.close()

    async def snapshot(self) -> Snapshot:
        """See `Sandbox`. Read from the overlay's upper layer, which no process in the sandbox can name."""
        if self._stopped:
            raise TransferError(self._about("the sandbox was stopped."))
        attribute = layout.opaque_attribute(privileged=os.geteuid() == 0)
        upper = os.dup(self._upper)

        def read() -> Snapshot:
            try:
                return take_snapshot(upper, self._spec.workspace, attribute)
            finally:
                os.close(upper)

        return await asyncio.to_thread(read)

    async def stop(self) -> None:
        """See `Sandbox`."""
        if self._stopped:
            return
        self._stopped = True
        try:
            # Whatever the proxy says, the sandbox ends; the socket is closed either way.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._detach(), _PROXY_S)
        finally:
            if self._reserved is not None:
                self._reserved.close()
            os.close(self._upper)
            self._keepers.close()
            await self._end()

    def _about(self, message: str) -> str:
        return f"{self._spec.trial_id}: {message}"

"""The host's end of the proxy's connections: each becomes one to a private socket that the proxy serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass, field
from typing import Any

from legorl.sandbox.base import ProxyEndpoint
from legorl.sandbox.inside.tunnels import WINDOW
from legorl.sandbox.inside_link import Requests

_CHUNK = 1 << 16
_CONNECT_S = 10.0


@dataclass
class _Connection:
    """One connection of the agent's, as the proxy sees it."""

    pending: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    """From the agent, for the proxy; None at its end."""
    credit: asyncio.Event = field(default_factory=asyncio.Event)
    unacknowledged: int = 0
    """From the proxy, not yet taken by the agent."""
    task: asyncio.Task[None] | None = None


class ProxyTunnels:
    """Lets one container reach one proxy. The socket's directory is this user's alone."""

    def __init__(self, link: Requests, proxy: ProxyEndpoint) -> None:
        self._link = link
        self._proxy = proxy
        self._connections: dict[int, _Connection] = {}
        self._directory = ""
        self._listener: socket.socket | None = None

    async def open(self) -> None:
        """Have the proxy serve, and take what the container sends."""
        self._directory = tempfile.mkdtemp(prefix="legorl-proxy-")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.path.join(self._directory, "socket"))  # noqa: PTH118
        listener.listen(128)
        listener.setblocking(False)
        self._listener = listener
        await self._proxy.attach(listener)
        self._link.tunnel = self._take

    async def close(self) -> None:
        """End every connection; the proxy serves no more."""
        tasks = [connection.task for connection in self._connections.values() if connection.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        listener, self._listener = self._listener, None
        try:
            if listener is not None:
                await self._proxy.detach(listener)
        finally:
            if listener is not None:
                listener.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _take(self, header: dict[str, Any], payload: bytes) -> None:
        number = header["tunnel"]
        if header["op"] == "open":
            connection = self._connections[number] = _Connection()
            connection.credit.set()
            connection.task = asyncio.ensure_future(self._serve(number, connection))
            return
        known = self._connections.get(number)
        if known is None:
            return
        if header["op"] == "data":
            known.pending.put_nowait(payload)
        elif header["op"] == "ack":
            known.unacknowledged -= header["bytes"]
            known.credit.set()
        elif header["op"] == "shut":
            known.pending.put_nowait(None)
        elif known.task is not None:
            known.task.cancel()

    async def _serve(self, number: int, connection: _Connection) -> None:
        writer = None
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_unix_connection(f"{self._directory}/socket")
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._to_proxy(number, connection, writer))
                await self._from_proxy(number, connection, reader)
                sending.cancel()
        except* (OSError, TimeoutError):
            pass  # the proxy closed it, as it may
        finally:
            self._connections.pop(number, None)
            self._link.send({"op": "shut", "tunnel": number})
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _to_proxy(self, number: int, connection: _Connection, writer: asyncio.StreamWriter) -> None:
        while (data := await connection.pending.get()) is not None:
            writer.write(data)
            await writer.drain()
            self._link.send({"op": "ack", "tunnel": number, "bytes": len(data)})
        writer.write_eof()

    async def _from_proxy(self, number: int, connection: _Connection, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_CHUNK):
            while connection.unacknowledged >= WINDOW:
                connection.credit.clear()
                await connection.credit.wait()
            connection.unacknowledged += len(data)
            self._link.send({"op": "data", "tunnel": number}, data)

"""The proxy as the sandbox in a pod sees it: connections to its loopback, carried to the proxy's address."""

from __future__ import annotations

import asyncio
import contextlib
import socket

_CONNECT_S = 10.0
_CHUNK = 1 << 16


class Relay:
    """A `ProxyEndpoint` that passes on bytes."""

    def __init__(self, host: str, port: int) -> None:
        self.address = host, port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def attach(self, sock: socket.socket) -> None:
        """See `ProxyEndpoint`."""
        self._server = await asyncio.start_server(self._carry, sock=sock)

    async def detach(self, sock: socket.socket) -> None:
        """See `ProxyEndpoint`. Connections end too."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        sock.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            async with asyncio.timeout(_CONNECT_S):
                there, back = await asyncio.open_connection(*self.address)
        except (OSError, TimeoutError):
            self._open.discard(writer)
            writer.transport.abort()
            return
        self._open.add(back)
        try:
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        finally:
            for end in (writer, back):
                self._open.discard(end)
                end.close()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                target.write(data)
                await target.drain()
            if target.can_write_eof():
                target.write_eof()

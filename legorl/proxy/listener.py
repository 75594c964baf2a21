"""One listening socket being served, and the bounds of every connection to it.

Invariant: whoever connects can hold no more than a bounded amount of memory, descriptors and time: so many
connections, so many bytes and seconds before the body of a request begins. What is beyond is refused before
it reaches the application, in a shape that both kinds of clients read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from legorl.proxy.messages import Json
from legorl.proxy.wire import compact

CONNECTIONS = 256
"""To one socket, that is, of one sandbox."""
HEAD_BYTES = 64 << 10
"""Of a request line and its headers; those of real harnesses take 4 KiB."""
HEAD_TIMEOUT_S = 60.0
KEEP_ALIVE_S = 600
DETACH_TIMEOUT_S = 1.0
"""Answers under way get this long to end by themselves, and again when their client is cut off."""

App = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[MutableMapping[str, Any]]],
        Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ],
    Awaitable[None],
]


class Listener:
    """See the module."""

    def __init__(self, app: App) -> None:
        self._config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the application logs its own failures; a client's are no news
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config.load()
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        self._state.default_headers = list(self._config.encoded_headers)
        self._server = await loop.create_server(self._connection, sock=sock)

    async def stop(self) -> None:
        """Close the socket and its connections; what does not end in time is cut off."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        await self._tasks_end()
        for connection in list(self._state.connections):
            connection.transport.abort()  # the application sees its client leave
        await self._tasks_end()

    def _connection(self) -> asyncio.Protocol:
        return _Connection(self._config, self._state, {}, asyncio.get_running_loop())

    async def _tasks_end(self) -> None:
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=DETACH_TIMEOUT_S)


class _Connection(HttpToolsProtocol):
    """uvicorn's protocol, bounded where it trusts the client."""

    _head: asyncio.TimerHandle | None = None
    """Runs while the head of a request is awaited."""
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > CONNECTIONS:
            self._refuse("503 Service Unavailable", f"more than {CONNECTIONS} connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._head is not None and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse("431 Request Header Fields Too Large", f"headers: more than {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", msg)

    def _await_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        self._head_bytes = 0
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _refuse(self, status: str, message: str) -> None:
        error: Json = {"type": "invalid_request_error", "message": message, "param": None, "code": None}
        body = compact({"type": "error", "error": error})
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\nx-should-retry: false\r\n\r\n" + body)
        self.transport.close()

"""The proxy's port inside a container: connections to it travel as frames over PID 1's own stream.

So the container needs no network, no socket of the host and no second container. Invariant: neither side
holds more than about `WINDOW` bytes of a connection that the other end has not taken, and no more than
`CONNECTIONS` are open.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WINDOW = 1 << 18
CONNECTIONS = 64
_CHUNK = 1 << 16

Send = Callable[[dict[str, Any], bytes], None]


@dataclass
class _Connection:
    """One connection of the agent's."""

    sock: socket.socket
    unacknowledged: int = 0
    """Sent to the host, not yet taken there."""
    waiting: bytearray = field(default_factory=bytearray)
    """For the agent, not yet taken by it."""
    half_closed: bool = False
    """The agent sends no more."""
    closing: bool = False
    """The host sends no more."""


class Tunnels:
    """Serves the port while it is open. Runs in the loop of PID 1."""

    def __init__(self, selector: selectors.BaseSelector, send: Send, first: int = 1) -> None:
        """
        Args:
            first: number of the first connection.
        """
        self._selector = selector
        self._send = send
        self._listener: socket.socket | None = None
        self._connections: dict[int, _Connection] = {}
        self._serial = first - 1

    def listen(self, port: int) -> None:
        """Open the port. Raises `OSError`."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listener = listener
        self._watch_listener()

    def mute(self) -> None:
        """Close the port and all its connections."""
        if self._listener is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for number in list(self._connections):
            self._drop(number)

    def handle(self, header: dict[str, Any], payload: bytes) -> None:
        """A frame of the host's for one connection: `data`, `ack` or `shut`."""
        number = header["tunnel"]
        connection = self._connections.get(number)
        if connection is None:
            return  # closed meanwhile
        if header["op"] == "ack":
            connection.unacknowledged -= header["bytes"]
        elif header["op"] == "data":
            connection.waiting += payload
            self._flush(number, connection)
        else:
            connection.closing = True
            self._flush(number, connection)
        self._watch(number, connection)

    def _watch_listener(self) -> None:
        if self._listener is None:
            return
        open_for_more = len(self._connections) < CONNECTIONS
        registered = self._listener in self._selector.get_map()
        if open_for_more and not registered:
            self._selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept())
        elif registered and not open_for_more:
            self._selector.unregister(self._listener)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        self._serial += 1
        self._connections[self._serial] = connection = _Connection(sock)
        self._send({"op": "open", "tunnel": self._serial}, b"")
        self._watch(self._serial, connection)
        self._watch_listener()

    def _watch(self, number: int, connection: _Connection) -> None:
        """Wait for what this connection can go on with."""
        if number not in self._connections:
            return
        events = 0
        if not connection.half_closed and connection.unacknowledged < WINDOW:
            events |= selectors.EVENT_READ
        if connection.waiting:
            events |= selectors.EVENT_WRITE
        registered = connection.sock in self._selector.get_map()
        if registered:
            self._selector.unregister(connection.sock)
        if events:
            self._selector.register(
                connection.sock, events, lambda mask: self._ready(number, connection, mask)
            )

    def _ready(self, number: int, connection: _Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(number, connection)
        if mask & selectors.EVENT_READ and number in self._connections:
            self._receive(number, connection)
        self._watch(number, connection)

    def _receive(self, number: int, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._drop(number)
            return
        if data:
            connection.unacknowledged += len(data)
            self._send({"op": "data", "tunnel": number}, data)
        else:
            connection.half_closed = True
            self._send({"op": "shut", "tunnel": number}, b"")

    def _flush(self, number: int, connection: _Connection) -> None:
        while connection.waiting:
            try:
                taken = connection.sock.send(connection.waiting[:_CHUNK])
            except BlockingIOError:
                return
            except OSError:
                self._drop(number)
                return
            del connection.waiting[:taken]
            self._send({"op": "ack", "tunnel": number, "bytes": taken}, b"")
        if connection.closing:
            self._drop(number)

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        self._send({"op": "gone", "tunnel": number}, b"")
        self._watch_listener()

"""The proxy's port in a sandbox that offers no stream: a process holds the connections, commands carry bytes.

    agent ─ 127.0.0.1:port ─ relay ─ local socket ─ `poll` and `feed`, commands of the host

Invariant: bytes are numbered in both directions and kept until the host names a later number, so a command
that is lost, or carried out twice, loses and doubles nothing. The local socket is of the relay's user alone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from typing import Any

from legorl.sandbox.inside.frames import Decoder, Frame, encode
from legorl.sandbox.inside.tunnels import Tunnels

POLL_BYTES = 96 << 10
"""Most of one `poll`: its answer fits on a line."""
_REQUEST_S = 5.0
_CHUNK = 1 << 16


class _Relay:
    """State of the process."""

    def __init__(self, control: socket.socket, port: int, first: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._tunnels = Tunnels(self._selector, self._send, first)
        self._control = control
        self._decoder = Decoder()
        self._taken = 0
        """Bytes of the host's that were handled."""
        self._out = bytearray()
        self._base = 0
        """Number of the first byte of `_out`."""
        self._poll: tuple[socket.socket, float] | None = None
        """A connection that waits for bytes, and until when."""
        self._tunnels.listen(port)
        self._selector.register(control, selectors.EVENT_READ, lambda _: self._accept())

    def serve(self, lifetime_s: float) -> None:
        end = time.monotonic() + lifetime_s
        while time.monotonic() < end:
            until = self._poll[1] if self._poll and not self._out else end
            if self._poll and self._out:
                until = 0.0
            for key, mask in self._selector.select(max(0.0, until - time.monotonic())):
                if self._selector.get_map().get(key.fd) is key:  # an earlier one may have closed it
                    key.data(mask)
            if self._poll and (self._out or time.monotonic() >= self._poll[1]):
                self._answer_poll(self._poll[0])

    def _send(self, header: dict[str, Any], payload: bytes) -> None:
        self._out += encode(header, payload)

    def _accept(self) -> None:
        connection, _ = self._control.accept()
        try:
            header, payload = _receive(connection)
        except (OSError, ValueError):
            connection.close()
            return
        if header["op"] == "poll":
            taken = header["offset"] - self._base
            del self._out[: max(0, taken)]
            self._base += max(0, taken)
            if self._poll is not None:
                self._poll[0].close()
            self._poll = connection, time.monotonic() + header["wait_s"]
            return
        new = payload[max(0, self._taken - header["offset"]) :]
        self._taken += len(new)
        for frame in self._decoder.feed(new):
            self._tunnels.handle(*frame)
        _reply(connection, {"taken": self._taken}, b"")

    def _answer_poll(self, connection: socket.socket) -> None:
        self._poll = None
        _reply(connection, {"offset": self._base}, bytes(self._out[:POLL_BYTES]))


def serve(header: dict[str, Any], _: bytes) -> Frame:
    """Be the relay until its time is over or it is killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(header["socket"])  # noqa: PTH108
        os.umask(0o077)
        control.bind(header["socket"])
        control.listen(16)
        _Relay(control, header["port"], header["first"]).serve(header["lifetime_s"])
    return {}, b""


def ask(header: dict[str, Any], payload: bytes) -> Frame:
    """`poll` (bytes from `offset` on, for which it waits) or `feed` (bytes that begin at `offset`)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_REQUEST_S)
        connection.connect(header["socket"])
        connection.sendall(encode(header, payload))
        return _receive(connection, header.get("wait_s", 0.0) + _REQUEST_S)


def _receive(connection: socket.socket, timeout_s: float = _REQUEST_S) -> Frame:
    connection.settimeout(timeout_s)
    decoder = Decoder()
    while data := connection.recv(_CHUNK):
        for frame in decoder.feed(data):
            return frame
    raise OSError("the other end closed the connection")


def _reply(connection: socket.socket, header: dict[str, Any], payload: bytes) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_REQUEST_S)
        connection.sendall(encode(header, payload))

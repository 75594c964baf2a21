"""Messages between host process, launcher and supervisors: a JSON object and some file descriptors.

Carried by a SOCK_SEQPACKET pair: a message arrives whole or not at all, and end-of-file means that every
process holding the other end is gone.
"""

from __future__ import annotations

import array
import json
import socket
from collections.abc import Sequence
from typing import Any

MESSAGE_BYTES = 200_000
"""Largest message; above it the kernel's default socket buffer is full."""
_MAX_FDS = 8


class MessageTooLargeError(ValueError):
    """A message beyond `MESSAGE_BYTES`."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, both closed on exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def encode(message: dict[str, Any]) -> bytes:
    """Bytes of a message.

    Raises:
        MessageTooLargeError: beyond `MESSAGE_BYTES`.
    """
    data = json.dumps(message).encode()
    if len(data) > MESSAGE_BYTES:
        raise MessageTooLargeError(f"a message of {len(data)} bytes; at most {MESSAGE_BYTES} fit")
    return data


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one encoded message with file descriptors."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One message and its file descriptors (closed on exec), None at end-of-file."""
    # Not `socket.recv_fds`: it drops the flag, and a command would inherit the descriptors.
    space = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content)
    if not data:
        return None
    message: dict[str, Any] = json.loads(data)
    return message, list(fds)

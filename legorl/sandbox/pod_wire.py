"""What travels between a provider and the guard in its pod: frames of several streams over one.

A request is a stream: its header, its data, its end, which carries the data's checksum; the answer comes
the same way on the stream's number. Standard library only: the guard reads this too.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_HEAD = struct.Struct(">IBI")
HEAD_BYTES = _HEAD.size
CHUNK = 1 << 16
"""Largest piece of data in one frame."""
_FRAME_BYTES = 1 << 26


class Kind(IntEnum):
    """Of a frame."""

    OPEN = 1
    """Begins a request: a JSON object with `op`."""
    DATA = 2
    MORE = 3
    """Data of an answer's second part: standard error, or a snapshot's patch."""
    END = 4
    """A JSON object; `sha256` of all the stream's data in this direction."""
    CANCEL = 5
    BEAT = 6
    """The provider lives."""


class WireError(Exception):
    """What arrived is no frame, or not what was sent."""


@dataclass(frozen=True)
class Frame:
    """One frame."""

    kind: Kind
    stream: int
    payload: bytes = b""

    @property
    def message(self) -> dict[str, Any]:
        """The payload of `OPEN` and `END`."""
        value: dict[str, Any] = json.loads(self.payload)
        return value


def encode(kind: Kind, stream: int, payload: bytes | dict[str, Any] = b"") -> bytes:
    """Bytes of a frame."""
    data = json.dumps(payload).encode() if isinstance(payload, dict) else payload
    return _HEAD.pack(len(data), kind, stream) + data


def parse_head(head: bytes | bytearray) -> tuple[int, Kind, int]:
    """Length of the payload, kind and stream of the frame that begins with these `HEAD_BYTES`."""
    length, kind, stream = _HEAD.unpack(head)
    if length > _FRAME_BYTES or kind not in set(Kind):
        raise WireError(f"no frame begins with {head.hex()}")
    return length, Kind(kind), stream


class Parser:
    """Cuts bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames that are complete now. Raises `WireError`."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= HEAD_BYTES:
                length, kind, stream = parse_head(self._buffer[start : start + HEAD_BYTES])
                end = start + HEAD_BYTES + length
                if len(self._buffer) < end:
                    return
                yield Frame(kind, stream, bytes(self._buffer[start + HEAD_BYTES : end]))
                start = end
        finally:
            del self._buffer[:start]


class Body:
    """Data of one direction of a stream: collects it, and holds the sender to its checksum."""

    def __init__(self) -> None:
        self.data, self.more = bytearray(), bytearray()
        self._digest = hashlib.sha256()

    def add(self, frame: Frame) -> None:
        """Take a DATA or MORE frame."""
        (self.data if frame.kind is Kind.DATA else self.more).extend(frame.payload)
        self._digest.update(frame.payload)

    @property
    def sha256(self) -> str:
        """Of everything so far."""
        return self._digest.hexdigest()

    def check(self, end: dict[str, Any]) -> None:
        """Raises `WireError` unless everything that was sent is here, in order."""
        if end.get("sha256", self.sha256) != self.sha256:
            raise WireError(f"{len(self.data)} bytes arrived with a wrong checksum")


def chunks(data: bytes | bytearray | memoryview) -> Iterator[bytes]:
    """Pieces that fit into a frame."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK):
        yield bytes(view[start : start + CHUNK])


def checksum(*parts: bytes | bytearray) -> str:
    """Of data, and of what follows it as MORE."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()

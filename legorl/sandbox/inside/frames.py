"""Messages between a host and PID 1 of a container, over a byte stream: a JSON object and a payload each.

A frame: two lengths (four bytes each, big-endian), the object, the payload.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTHS = struct.Struct("!II")
FRAME_BYTES = 1 << 30
"""A frame that claims more is no frame."""

Frame = tuple[dict[str, Any], bytes]


def head(header: dict[str, Any], payload_bytes: int) -> bytes:
    """A frame without its payload, which is to follow."""
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), payload_bytes) + text


def encode(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """A whole frame."""
    return head(header, len(payload)) + payload


class Decoder:
    """Cuts a stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames that are complete with these bytes.

        Raises:
            ValueError: what came is no frame.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            text, payload = _LENGTHS.unpack_from(self._buffer)
            if text + payload > FRAME_BYTES:
                raise ValueError(f"a frame of {text + payload} bytes")
            start, end = _LENGTHS.size + text, _LENGTHS.size + text + payload
            if len(self._buffer) < end:
                return
            frame = json.loads(self._buffer[_LENGTHS.size : start]), bytes(self._buffer[start:end])
            del self._buffer[:end]
            yield frame

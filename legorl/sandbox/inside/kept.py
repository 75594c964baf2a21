"""Bounded output: the first and the last half of a limit are kept."""

from __future__ import annotations

_CHUNK = 1 << 16


class Kept:
    """Takes any number of bytes, holds about `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        """Take more."""
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * self._half + _CHUNK:
            self._trim()

    def _trim(self) -> None:
        extra = len(self._tail) - self._half
        if extra > 0:
            self._dropped += extra
            del self._tail[:extra]

    def contents(self) -> bytes:
        """What was kept; a line says how much was not."""
        self._trim()
        if not self._dropped:
            return bytes(self._head + self._tail)
        return b"%s\n[... %d bytes left out ...]\n%s" % (self._head, self._dropped, self._tail)

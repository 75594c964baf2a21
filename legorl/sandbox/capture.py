"""Standard input and output of a command, as descriptors handed to the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterator
from types import TracebackType

from legorl.sandbox.inside.kept import Kept

_CHUNK = 1 << 16
_PIPE_MAX = 1 << 20
"""A pipe holds at most this much (fs.pipe-max-size for users): what is left of a command that has ended."""


@contextlib.contextmanager
def sealed_input(data: bytes) -> Iterator[int]:
    """A descriptor from which exactly `data` can be read, and which cannot be written."""
    if not data:
        fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    else:
        fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(os.dup(fd), "wb") as stream:
            stream.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    try:
        yield fd
    finally:
        os.close(fd)


class Capture:
    """Reads a pipe in the event loop; keeps the first and the last half of `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._kept = Kept(limit)

    def __enter__(self) -> Capture:
        self._loop = asyncio.get_running_loop()
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._open = True
        self._loop.add_reader(self._reader, self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._loop.remove_reader(self._reader)
        os.close(self._reader)
        os.close(self.writer)

    def _read(self) -> int:
        try:
            data = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self._loop.remove_reader(self._reader)
            self._open = False
            return 0
        self._kept.add(data)
        return len(data)

    def contents(self) -> bytes:
        """Everything, after the command has ended: reads what the pipe still holds and waits for nothing."""
        left = _PIPE_MAX
        while self._open and left > 0 and (count := self._read()):
            left -= count
        return self._kept.contents()

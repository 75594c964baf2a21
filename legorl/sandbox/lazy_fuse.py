"""A file system with one file in it, whose bytes a function gives: as little of FUSE's protocol as it takes.

Invariant: every request is answered, and one that cannot be is answered with an error, so no reader hangs.
Standard library only; version 7.31 of the protocol, which every kernel since 5.4 speaks.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from collections.abc import Callable

from legorl.sandbox import linux

FILE = "image"
_FILE_ID = 2
_HEADER = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")
_READ = struct.Struct("<QQIIQII")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_INIT = struct.Struct("<IIIIHHIIHHI7I")
_MAX_READ = 1 << 20
_READAHEAD = 128 << 10
_FLAGS = (1 << 0) | (1 << 22)  # asynchronous reads; as many pages in one as `_MAX_READ` has
_VALID_S = 86_400
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ_OP, _STATFS, _RELEASE, _FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
_INIT_OP, _OPENDIR, _READDIR, _RELEASEDIR, _ACCESS, _INTERRUPT, _BATCH_FORGET = 26, 27, 28, 29, 34, 36, 42
_KEEP_CACHE = 1 << 1

Read = Callable[[int, int], bytes]


class OneFile:
    """Serves `FILE` in a directory. Threads end when the file system is unmounted."""

    def __init__(self, size: int, read: Read, *, threads: int) -> None:
        """
        Args:
            read: offset and size to bytes; may raise anything, which the reader sees as EIO.
        """
        self._size = size
        self._read = read
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self._threads = threads

    def mount(self, directory: str) -> None:
        """Mount and serve. Raises `OSError`."""
        options = (
            f"fd={self._fd},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0,allow_other,max_read={_MAX_READ}"
        )
        linux.mount("legorl", directory, "fuse", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_RDONLY, options)
        for _ in range(self._threads):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._fd, _MAX_READ + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return  # unmounted
            _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
            if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            try:
                code, data = 0, self._answer(opcode, node, request[_HEADER.size :])
            except OSError as error:
                code, data = -(error.errno or errno.EIO), b""
            except Exception:
                code, data = -errno.EIO, b""
            try:
                os.writev(self._fd, [_ANSWER.pack(_ANSWER.size + len(data), code, unique), data])
            except OSError as error:
                if error.errno != errno.ENOENT:  # its reader has gone away
                    return

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes:
        if opcode == _INIT_OP:
            pages = _MAX_READ // 4096
            return _INIT.pack(7, 31, _READAHEAD, _FLAGS, 64, 48, 4096, 1, pages, 0, 0, *[0] * 7)
        if opcode == _LOOKUP and body.rstrip(b"\0") == FILE.encode():
            return struct.pack("<QQQQII", _FILE_ID, 0, _VALID_S, _VALID_S, 0, 0) + self._attributes(_FILE_ID)
        if opcode == _LOOKUP:
            raise OSError(errno.ENOENT, "")
        if opcode == _GETATTR:
            return struct.pack("<QII", _VALID_S, 0, 0) + self._attributes(node)
        if opcode in (_OPEN, _OPENDIR):
            return struct.pack("<QII", 0, _KEEP_CACHE, 0)
        if opcode == _READ_OP:
            _, offset, size, *_ = _READ.unpack_from(body)
            return self._read(offset, size)
        if opcode == _STATFS:
            return struct.pack("<5Q10I", *[0] * 5, 4096, 255, 4096, *[0] * 7)
        if opcode in (_RELEASE, _RELEASEDIR, _FLUSH, _READDIR, _ACCESS):
            return b""
        raise OSError(errno.ENOSYS, "")

    def _attributes(self, node: int) -> bytes:
        directory = node != _FILE_ID
        mode, size = (stat.S_IFDIR | 0o555, 0) if directory else (stat.S_IFREG | 0o444, self._size)
        blocks = (size + 511) // 512
        return _ATTRIBUTES.pack(node, size, blocks, 0, 0, 0, 0, 0, 0, mode, 1 + directory, 0, 0, 0, 4096, 0)

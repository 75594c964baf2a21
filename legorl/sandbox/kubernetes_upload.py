"""A task's tree as the pieces of a tar archive, made while it is sent, so that no copy of it is needed."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from legorl.sandbox import layout
from legorl.sandbox.pod_wire import CHUNK

_ROOT_MODE = 0o755


async def tar_of(directory: Path, uid: int = layout.UID) -> AsyncIterator[bytes]:
    """Files, directories and links below `directory`, owned by `uid`; sockets and the like are left out.

    Raises:
        OSError: something could not be read.
    """
    gathered = bytearray()
    for piece in _pieces(directory, uid):
        gathered += piece
        if len(gathered) >= CHUNK:
            for start in range(0, len(gathered), CHUNK):
                yield bytes(gathered[start : start + CHUNK])
            gathered.clear()
    yield bytes(gathered)


def _pieces(directory: Path, uid: int) -> Iterator[bytes]:
    root = tarfile.TarInfo(".")
    root.type, root.mode, root.uid, root.gid = tarfile.DIRTYPE, _ROOT_MODE, uid, uid
    yield root.tobuf()
    for top, directories, files in os.walk(directory):
        directories.sort()
        for name in sorted([*directories, *files]):
            yield from _entry(Path(top, name), str(Path(top, name).relative_to(directory)), uid)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _entry(path: Path, name: str, uid: int) -> Iterator[bytes]:
    status = path.lstat()
    info = tarfile.TarInfo(name)
    info.uid = info.gid = uid
    info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
    elif not stat.S_ISREG(status.st_mode):
        return
    else:
        with path.open("rb") as stream:
            info.size = os.fstat(stream.fileno()).st_size
            yield _head(info)
            left = info.size
            while left:
                data = stream.read(min(left, CHUNK))
                if not data:
                    raise OSError(f"{path} became shorter while it was read")
                left -= len(data)
                yield data
        yield bytes(-info.size % tarfile.BLOCKSIZE)
        return
    yield _head(info)


def _head(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")

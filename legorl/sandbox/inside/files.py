"""Files of a sandbox, written and read with its agent's rights. No link is followed, no pipe waited for."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def write_all(entries: Sequence[Sequence[object]], contents: bytes) -> None:
    """Write files, links and directories whose contents lie one after another."""
    position = 0
    for path, mode, size, time_ns in entries:
        assert isinstance(path, str) and isinstance(mode, int) and isinstance(size, int)
        if stat.S_ISDIR(mode):
            os.makedirs(path, exist_ok=True)  # noqa: PTH103
        else:
            write(path, mode, contents[position : position + size])
            if isinstance(time_ns, int):
                os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)
        position += size


def write(path: str, mode: int, data: bytes) -> None:
    """Replace `path` atomically; what lies there is neither opened nor followed."""
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    partial = f"{path}.partial-{os.getpid()}"
    try:
        if stat.S_ISLNK(mode):
            os.symlink(data, os.fsencode(partial))  # noqa: PTH211
        else:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as stream:
                stream.write(data)
                os.fchmod(fd, mode & 0o7777)
        os.rename(partial, path)  # noqa: PTH104
    except OSError:
        if os.path.lexists(partial):
            os.unlink(partial)  # noqa: PTH108
        raise


def read(path: str, limit: int) -> bytes:
    """A regular file.

    Raises:
        OSError: it is none, is absent, or has more than `limit` bytes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes, of which at most {limit} are read", path)
        return stream.read(limit)


@contextlib.contextmanager
def opened(parent: int, name: str, mode: int) -> Iterator[int]:
    """A descriptor of an entry of a directory, also where its owner had taken away the right to read it."""
    refused = False
    try:
        fd = os.open(name, _READ, dir_fd=parent)
    except PermissionError:
        refused = True
        os.chmod(name, mode | stat.S_IRUSR | stat.S_IXUSR, dir_fd=parent)
        fd = os.open(name, _READ, dir_fd=parent)
    try:
        yield fd
    finally:
        if refused:
            os.fchmod(fd, stat.S_IMODE(mode))
        os.close(fd)

"""The container image of a task: one that it names, or what its Dockerfile makes, named by its content.

Invariant: the name of a built image is a digest of the whole build context, so what a name stands for never
changes, and a task that was edited after its image was built has no image until it is built anew.
"""

from __future__ import annotations

import hashlib
import io
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from legorl.errors import ImageError
from legorl.tasks.task import Task

REPOSITORY = "legorl-task"
FROM_DOCKERFILE = "dockerfile"
"""As `sandbox.image`: tasks that name no image have the one that their Dockerfile makes."""


def image_of(task: Task, default: str) -> str:
    """What a trial's sandbox is made of.

    Args:
        default: `sandbox.image`.

    Returns:
        The image's name; empty for the provider's own default.

    Raises:
        ImageError: the build context has something that is no file.
    """
    if task.image or default != FROM_DOCKERFILE:
        return task.image or default
    return built_image(task) if task.dockerfile is not None else ""


def built_image(task: Task) -> str:
    """Name under which `legorl tasks build` leaves the image of a task's Dockerfile.

    Raises:
        ImageError: the build context has something that is no file.
    """
    digest = hashlib.sha256()
    for path in _context(task):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            kind, data = b"link", bytes(path.readlink())
        else:
            kind, data = b"x" if mode & 0o100 else b"-", path.read_bytes()
        name = path.relative_to(task.environment).as_posix().encode()
        digest.update(b"%s\0%s\0%d\0" % (name, kind, len(data)) + data)
    return f"{REPOSITORY}:{digest.hexdigest()[:24]}"


def context_tar(task: Task) -> bytes:
    """What the engine builds from: `environment/`, as a tar.

    Raises:
        ImageError: it has something that is no file.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _context(task):
            info = tar.gettarinfo(path, path.relative_to(task.environment).as_posix())
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = 0  # or the engine would take equal files for different ones
            with path.open("rb") if info.isreg() else io.BytesIO() as stream:
                tar.addfile(info, stream)
    return buffer.getvalue()


def _context(task: Task) -> Iterator[Path]:
    """Every file and link, in one order."""
    for path in sorted(task.environment.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            yield path
        elif not stat.S_ISDIR(mode):
            raise ImageError(f"Task {task.id}: {path} is neither a file nor a link nor a directory.")

"""Root file systems for local sandboxes: a directory, or an image's tar, unpacked once and then shared.

Invariants: what lies in the cache is complete (it is unpacked beside and renamed) and named by the digest of
its tar; processes that want the same image at once unpack it once. Sandboxes see it read-only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from legorl.errors import ImageError
from legorl.sandbox.unpack import UnpackError, unpack

_FORMAT = "1"
_SLEEP = ("bin/sleep", "usr/bin/sleep")
_digests: dict[tuple[str, int, int, int], str] = {}
"""Path, inode, size and time of change of a tar -> its digest, so that a process reads it once."""


@dataclass(frozen=True)
class LocalImage:
    """What a sandbox's root is made of."""

    root: str
    env: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """It lies on this machine: what was there at the start is there."""


def local_image(reference: str, cache: Path) -> LocalImage:
    """The image at a path.

    Args:
        reference: absolute path of a directory, or of a tar: `docker save`, OCI layout or a root file system.
        cache: where tars are unpacked.

    Raises:
        ImageError: there is none there, or it cannot be unpacked.
    """
    path = Path(reference)
    if not path.is_absolute():
        raise ImageError(
            f"sandbox=local takes images by absolute path, not {reference!r}: save it to a file "
            f"(`docker save {reference} -o FILE.tar`) and name that, or take sandbox=docker."
        )
    try:
        if path.is_dir():
            root, env = path.resolve(), {}
        else:
            directory = _unpacked(path, _digest(path), cache)
            root, env = directory / "rootfs", json.loads((directory / "env.json").read_text())
        if not any(os.path.lexists(root / name) for name in _SLEEP):
            raise UnpackError(f"it has no {' or '.join(_SLEEP)}: is it a root file system?")
    except UnpackError as error:
        raise ImageError(f"The image {path} cannot be unpacked: {error}.") from error
    except OSError as error:
        raise ImageError(f"The image {path} cannot be used: {error}.") from error
    return LocalImage(str(root), env)


def _digest(path: Path) -> str:
    status = path.stat()
    known = (str(path), status.st_ino, status.st_size, status.st_ctime_ns)
    if known not in _digests:
        with path.open("rb") as stream:
            _digests[known] = hashlib.file_digest(stream, "sha256").hexdigest()
    return _digests[known]


def _unpacked(tar: Path, key: str, cache: Path) -> Path:
    target = cache / f"{_FORMAT}-{key[:24]}"
    if target.is_dir():
        return target
    with _alone(target, cache):
        if not target.is_dir():
            with _made(target) as made:
                (made / "rootfs").mkdir()
                (made / "rootfs").chmod(0o755)
                facts = unpack(tar, made / "rootfs")
                (made / "env.json").write_text(json.dumps(dict(facts.env)))
    return target


@contextmanager
def _made(target: Path) -> Iterator[Path]:
    """A directory to fill, which is then the target; what a killed process left of one is removed."""
    made = target.with_name(f".{target.name}.making")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    made.chmod(0o755)
    try:
        yield made
        made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _alone(target: Path, cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

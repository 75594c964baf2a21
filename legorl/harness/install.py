"""Pinned harness runtimes below the cache; `fetch.py` has what their builds use.

Invariant: a directory `<cache>/harness/<name>-<version>` is complete, matches its pinned entry file and is
read-only, or it does not exist. It is built in a sibling directory and renamed; a file lock keeps two
processes from building at once. Once it exists, nothing here needs the network.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from legorl.errors import UserError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Runtime:
    """What to install. `build` fills an empty directory; `entry` is the file whose content is pinned."""

    name: str
    version: str
    entry: str
    entry_sha256: str
    build: Callable[[Path], None]
    tag: str = ""
    """Part of the directory name where one version has several builds (the Python it was built for)."""

    @property
    def directory(self) -> str:
        """Name below `<cache>/harness`."""
        return "-".join(part for part in (self.name, self.version, self.tag) if part)


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`."""

    name: str
    version: str
    files: int
    bytes: int
    entry: str
    entry_sha256: str


def install(runtime: Runtime, cache: Path) -> Path:
    """Build and verify the runtime unless a verified one is there.

    Raises:
        UserError: a tool is missing, a registry does not deliver, or the content is not the pinned one.
    """
    home = cache.resolve() / "harness"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / f".{runtime.directory}.lock"):
            target = home / runtime.directory
            if target.exists():
                _verify(runtime, target)
            else:
                _build(runtime, home, target)
            return target
    except OSError as error:
        raise UserError(f"Harness {runtime.name} could not be installed below {home}: {error}.") from error


def locate(runtime: Runtime, cache: Path) -> Path:
    """The installed runtime; a cheap check that reads its manifest only.

    Raises:
        UserError: not installed, or another version; names the command that installs it.
    """
    target = cache.resolve() / "harness" / runtime.directory
    if not (target / MANIFEST).is_file():
        raise UserError(
            f"Harness {runtime.name} {runtime.version} is not installed in {cache}. "
            f"Run: legorl harness install {runtime.name} --cache {cache}"
        )
    return target


def _build(runtime: Runtime, home: Path, target: Path) -> None:
    for left in home.glob(f".{runtime.directory}.????????"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left)
    partial = Path(tempfile.mkdtemp(prefix=f".{runtime.directory}.", dir=home))
    try:
        runtime.build(partial)
        entry = partial / runtime.entry
        if not entry.is_file():
            raise UserError(f"The package of {runtime.name} {runtime.version} has no {runtime.entry}.")
        files, size = _measure(partial)
        manifest = Manifest(runtime.name, runtime.version, files, size, runtime.entry, _sha256(entry))
        _check_entry(runtime, manifest.entry_sha256, partial)
        (partial / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")
        _make_read_only(partial)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _verify(runtime: Runtime, target: Path) -> None:
    try:
        manifest = Manifest(**json.loads((target / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{target} has no readable {MANIFEST} ({error}). {_advice(target)}") from error
    found = _measure(target)
    if found != (manifest.files, manifest.bytes):
        raise UserError(
            f"{target} holds {found[0]} files with {found[1]} bytes; "
            f"its manifest says {manifest.files} and {manifest.bytes}. {_advice(target)}"
        )
    _check_entry(runtime, _sha256(target / runtime.entry), target)


def _check_entry(runtime: Runtime, digest: str, where: Path) -> None:
    if digest != runtime.entry_sha256:
        raise UserError(
            f"{where / runtime.entry} is not the file of {runtime.name} {runtime.version}: "
            f"sha256 is {digest}, pinned is {runtime.entry_sha256}. {_advice(where)}"
        )


def _advice(target: Path) -> str:
    return f"Remove {target} and install it again."


def _measure(root: Path) -> tuple[int, int]:
    """Number and total size of the regular files, without the manifest."""
    sizes = [f.stat().st_size for f in root.rglob("*") if f.is_file() and f != root / MANIFEST]
    return len(sizes), sum(sizes)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _make_read_only(root: Path) -> None:
    """No file writable, all readable for the sandbox's user. Directories stay so that `rm -r` works."""
    for path in (root, *root.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        elif not path.is_symlink():
            path.chmod(0o555 if path.stat().st_mode & 0o100 else 0o444)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock; a process that dies gives it back."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

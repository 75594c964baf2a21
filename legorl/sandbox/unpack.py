"""Container images as tar files, unpacked without an engine: a root file system, `docker save`, OCI's layout.

Invariant: whatever a tar says (`..`, absolute names, links that lead out, layers that use an earlier layer's
links), nothing is written or read outside the target. Devices and owners are left out, set-id bits dropped.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_LINKS = 40


class UnpackError(Exception):
    """The file is no image, or a broken one."""


@dataclass(frozen=True)
class Unpacked:
    """What an image says besides its files."""

    env: Mapping[str, str] = field(default_factory=dict)


def unpack(image: Path, target: Path) -> Unpacked:
    """Unpack an image into an empty directory.

    Raises:
        UnpackError: it is none.
        OSError: it cannot be read, or the target not written.
    """
    try:
        with tarfile.open(image) as tar:
            names = {member.name.removeprefix("./") for member in tar}
            if "manifest.json" in names:
                (first, *_) = _json(tar, "manifest.json")
                config, layers = str(first["Config"]), [str(name) for name in first["Layers"]]
            elif "index.json" in names and "oci-layout" in names:
                manifest = _oci_manifest(tar)
                config = _blob(manifest["config"])
                layers = [_blob(layer) for layer in manifest["layers"]]
            else:
                _unpack_layer(tar, target)
                return Unpacked()
            for layer in layers:
                with tarfile.open(fileobj=_open(tar, layer)) as members:
                    _unpack_layer(members, target)
            variables = _json(tar, config).get("config", {}).get("Env") or []
            return Unpacked(dict(variable.partition("=")[::2] for variable in variables))
    except (tarfile.TarError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnpackError(f"{type(error).__name__}: {error}") from error


def _oci_manifest(tar: tarfile.TarFile) -> Any:
    """The first one; an index of platforms is followed."""
    manifest = _json(tar, "index.json")
    while "manifests" in manifest:
        manifest = _json(tar, _blob(manifest["manifests"][0]))
    return manifest


def _blob(reference: Mapping[str, str]) -> str:
    return f"blobs/{reference['digest'].replace(':', '/')}"


def _json(tar: tarfile.TarFile, name: str) -> Any:
    return json.loads(_open(tar, name).read())


def _open(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        member = tar.getmember(name)
    except KeyError:
        member = tar.getmember(f"./{name}")
    stream = tar.extractfile(member)
    if stream is None:
        raise UnpackError(f"{name} is no file")
    return stream


def _unpack_layer(tar: tarfile.TarFile, target: Path) -> None:
    """Members in their order; whiteouts remove what earlier layers made, and only that."""
    made: set[Path] = set()
    for member in tar:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if not parts:
            continue
        if ".." in parts:
            raise UnpackError(f"the name {member.name!r} leads out of the image")
        parent = _inside(target, parts[:-1])
        parent.mkdir(parents=True, exist_ok=True)
        name, place = parts[-1], parent / parts[-1]
        if name == _OPAQUE:
            for entry in list(parent.iterdir()):
                if entry not in made:
                    _remove(entry)
        elif name.startswith(_WHITEOUT):
            _remove(parent / name.removeprefix(_WHITEOUT))
        else:
            _make(tar, member, place, target)
            made.add(place)


def _make(tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path, target: Path) -> None:
    if member.isdir():
        if not place.is_dir() or place.is_symlink():
            _remove(place)
            place.mkdir()
        place.chmod(stat.S_IMODE(member.mode) & 0o1777 | 0o700)
        return
    if member.islnk():
        parts = [part for part in member.linkname.split("/") if part not in ("", ".")]
        if not parts or ".." in parts:
            raise UnpackError(f"the link {member.name!r} leads out of the image")
        source = _inside(target, parts[:-1]) / parts[-1]
        if source != place:
            _remove(place)
            os.link(source, place, follow_symlinks=False)
        return
    _remove(place)
    if member.issym():
        place.symlink_to(member.linkname)
    elif member.isreg():
        stream = tar.extractfile(member)
        assert stream is not None, "a regular member has contents"
        with place.open("xb") as file:
            shutil.copyfileobj(stream, file)
            os.fchmod(file.fileno(), stat.S_IMODE(member.mode) & 0o777)
        os.utime(place, (member.mtime, member.mtime))


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _inside(target: Path, parts: list[str]) -> Path:
    """Where a directory of the image lies, with its links followed as a process in the image would."""
    place, wanted, links = target, list(reversed(parts)), 0
    while wanted:
        part = wanted.pop()
        if part == "..":
            place = target if place == target else place.parent
        elif (place / part).is_symlink():
            links += 1
            if links > _LINKS:
                raise UnpackError(f"{'/'.join(parts)} is a loop of links")
            link = str((place / part).readlink())
            place = target if link.startswith("/") else place
            wanted += [piece for piece in reversed(link.split("/")) if piece not in ("", ".")]
        else:
            place /= part
    return place

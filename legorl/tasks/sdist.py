"""Source distributions of real packages, fetched by pip at build time and checked: hash, licence."""

from __future__ import annotations

import email
import hashlib
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from legorl.errors import UserError
from legorl.tasks import process

DOWNLOAD_TIMEOUT_S = 600.0
"""For all packages of one call; pip builds each package's metadata, which takes it half a minute."""

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|ISC)\b")
COPYLEFT = re.compile(r"GPL|MPL|EUPL|CDDL|Copyleft", re.IGNORECASE)


@dataclass(frozen=True)
class Package:
    """A package, and which of its files make the repository of a task."""

    name: str
    version: str
    sha256: str
    """Of the source distribution."""
    split: str
    layout: Mapping[str, str]
    """Path in the source distribution (a file, or a directory with a closing /) -> path in the repository.
    Code comes to `<package>/` or `<module>.py`, tests to `tests/`."""
    leave_out: tuple[str, ...] = ()
    """Files of the repository that do not run everywhere."""

    @property
    def pin(self) -> str:
        """The requirement, as pip takes it."""
        return f"{self.name}=={self.version}"


def fetch(packages: Sequence[Package]) -> dict[str, dict[str, str]]:
    """Package name -> repository (path -> text).

    Raises:
        UserError: pip is missing or fails, or a package is not the pinned one or not permissively licensed.
    """
    with tempfile.TemporaryDirectory(prefix="legorl-sdist-") as directory:
        argv = [*_pip(), "download", "--no-deps", "--no-binary", ":all:", "--disable-pip-version-check"]
        argv += ["--dest", directory, *(package.pin for package in packages)]
        done = process.run(argv, timeout_s=DOWNLOAD_TIMEOUT_S)
        if done.code or done.timed_out:
            pins = ", ".join(package.pin for package in packages)
            raise UserError(
                f"Source distributions of {pins} could not be downloaded with pip; this pool needs a package "
                f"index: {done.output.strip()[-500:]}"
            )
        archives = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in Path(directory).iterdir()}
        repositories = {}
        for package in packages:
            if package.sha256 not in archives:
                raise UserError(
                    f"The index's source distribution of {package.pin} is not the pinned one "
                    f"(sha256 {package.sha256})."
                )
            repositories[package.name] = unpack(package, archives[package.sha256])
        return repositories


def _pip() -> list[str]:
    """The command line of a pip that works."""
    commands = [
        [sys.executable, "-m", "pip"],
        *([path] for name in ("pip", "pip3") if (path := shutil.which(name))),
    ]
    for command in commands:
        if process.run([*command, "--version"], timeout_s=60).code == 0:
            return command
    raise UserError("pip is missing; it downloads the packages of this pool. Install it: python -m ensurepip")


def unpack(package: Package, archive: Path) -> dict[str, str]:
    """The repository of a package: text files of its layout, and its licence.

    Raises:
        UserError: the licence is not a permissive one.
    """
    repository: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            stream = tar.extractfile(member) if member.isfile() else None
            if stream is None:
                continue
            if path == "PKG-INFO":
                check_licence(package, stream.read().decode())
            target = _target(package, path)
            if target is not None:
                repository[target] = stream.read().decode()
    if any(path.startswith("tests/") for path in repository):
        # A regular package: `tests` can then come from one directory of the search path only.
        repository.setdefault("tests/__init__.py", "")
    return dict(sorted(repository.items()))


def _target(package: Package, path: str) -> str | None:
    """Where a file of the source distribution lies in the repository; None for one that is left out."""
    if ".." in path.split("/"):
        return None
    if re.fullmatch(r"(LICENSE|LICENCE|COPYING)[^/]*", path):
        return path
    for source, target in package.layout.items():
        if path == source or (
            source.endswith("/") and path.startswith(source) and path.endswith((".py", ".json"))
        ):
            found = target + path[len(source) :]
            return None if found in package.leave_out else found
    return None


def check_licence(package: Package, metadata: str) -> None:
    """Refuse what is not permissively licensed according to its own metadata."""
    message = email.message_from_string(metadata)
    stated = [message.get("License-Expression", ""), message.get("License", "")[:200]]
    stated += [text for text in message.get_all("Classifier", []) if text.startswith("License ::")]
    text = "; ".join(filter(None, stated))
    if not PERMISSIVE.search(text) or COPYLEFT.search(text):
        raise UserError(
            f"{package.pin} states the licence {text!r}, which is not a permissive one this pool uses."
        )

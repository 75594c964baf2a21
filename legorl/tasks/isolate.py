"""Runs one script in a bubblewrap sandbox laid out like a trial's verify phase: /workspace, /tests, /logs.

Invariants: no network; the host is read-only and only its system directories are seen; memory and processes
are limited; when `run` returns, or this process dies, nothing of the script is left, on disk neither.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from legorl.errors import UserError
from legorl.tasks import process
from legorl.tasks.limits import limited

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
KEEP = "/keep"
"""What a script leaves here is in `Cell.kept`."""
PYTHON = "/opt/python/bin/python"
"""The sandbox's `python`: a link to this process's interpreter, first in PATH."""


@dataclass(frozen=True)
class Cell(process.Completed):
    """How a script ended, and what it kept."""

    kept: Mapping[str, bytes]
    """Path relative to `KEEP` -> contents; empty for a script that failed."""


def _argv(read_only: Mapping[str, Path], writable: Mapping[str, Path]) -> list[str]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UserError("bwrap is missing; tasks are validated in it. Install it: apt-get install bubblewrap")
    argv = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    interpreter = Path(os.path.realpath(sys.executable))
    for directory in dict.fromkeys([*SYSTEM, sys.base_prefix]):
        if Path(directory).is_symlink():
            argv += ["--symlink", str(Path(directory).readlink()), directory]
        elif Path(directory).exists():
            argv += ["--ro-bind", directory, directory]
    # What is installed beside the interpreter is not part of a task's environment (and slows every start).
    site = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    if Path(site).is_dir():
        argv += ["--tmpfs", site]
    argv += ["--symlink", str(interpreter), PYTHON, "--proc", "/proc", "--dev", "/dev"]
    for directory in ("/tmp", "/workspace", "/logs", KEEP):
        argv += ["--tmpfs", directory]
    for target, source in read_only.items():
        argv += ["--ro-bind", str(source.absolute()), target]
    for target, source in writable.items():
        argv += ["--bind", str(source.absolute()), target]
    search = f"{Path(PYTHON).parent}:/usr/local/bin:/usr/bin:/bin"
    for name, value in {"PATH": search, "HOME": "/tmp", "LANG": "C.UTF-8"}.items():
        argv += ["--setenv", name, value]
    return [*argv, "--chdir", "/workspace", "--", "bash"]


def run(
    script: str,
    *,
    read_only: Mapping[str, Path],
    writable: Mapping[str, Path] = MappingProxyType({}),
    timeout_s: float,
) -> Cell:
    """Run a bash script; mappings give host directories by their path in the sandbox.

    Raises:
        UserError: bwrap is missing or may not create namespaces here.
    """
    archive = os.memfd_create("kept")
    try:
        # What is kept leaves as one stream: a directory of the host would outlive a killed process.
        whole = f"{script}\ntar -C {KEEP} -c . >&{archive}\n"
        with limited() as prefix:
            argv = [*prefix, *_argv(read_only, writable)]
            done = process.run(argv, timeout_s=timeout_s, stdin=whole, pass_fds=[archive])
        if done.code and done.output.startswith("bwrap: "):
            raise UserError(f"bwrap does not work here: {done.output.strip()}")
        return Cell(done.code, done.output, done.timed_out, {} if done.code else _kept(archive))
    finally:
        os.close(archive)


def _kept(archive: int) -> dict[str, bytes]:
    """Regular files of the archive. A script that spoilt it has kept nothing."""
    kept = {}
    os.lseek(archive, 0, os.SEEK_SET)
    try:
        with os.fdopen(os.dup(archive), "rb") as stream, tarfile.open(fileobj=stream) as tar:
            for member in tar:
                if member.isfile() and (file := tar.extractfile(member)) is not None:
                    kept[member.name.removeprefix("./")] = file.read()
    except tarfile.TarError:
        return {}
    return kept

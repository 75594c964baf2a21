"""The root file system of this machine's packages is one that programs run in."""

from __future__ import annotations

import os
import subprocess
import tarfile

import pytest

from tests.integration.rootfs import rootfs, rootfs_tar

pytestmark = pytest.mark.integration


def test_programs_run_in_it() -> None:
    root = rootfs()
    script = (
        "git --version; python -Ic 'import ssl, ctypes, sqlite3; print(1)'; seq 3 | awk 'END {print NR}'; pwd"
    )
    box = ["bwrap", "--unshare-all", "--ro-bind", str(root), "/", "--dev", "/dev", "--proc", "/proc"]
    command = [*box, "--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--chdir", "/", "bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.startswith("git version ") and done.stdout.splitlines()[1:] == ["1", "3", "/"]


def test_the_tar_is_the_directory() -> None:
    root = rootfs()
    with tarfile.open(rootfs_tar()) as tar:
        names = {member.name.removeprefix("./") for member in tar}
    there = {os.path.relpath(os.path.join(top, n), root) for top, d, f in os.walk(root) for n in (*d, *f)}  # noqa: PTH118
    assert names == there | {"."}

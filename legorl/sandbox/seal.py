"""The repository as the agent gets it: the task's tree, not its history, in a one-commit git repository.

Invariants: the same tree gives the same commit on every machine; the history never enters the sealed copy
(it stays with the task); a sealed copy is made once per content and appears in the cache complete or not at
all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

from legorl.errors import ImageError
from legorl.sandbox.aside import made_aside

_FORMAT = b"1"
_TIME = 1_577_836_800
"""Modification time of every file and date of the commit: 2020-01-01 UTC."""
_GIT_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    # A pool may belong to another user.
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    **{f"GIT_{role}_NAME": "legorl" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_EMAIL": "legorl@localhost" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_DATE": f"{_TIME} +0000" for role in ("AUTHOR", "COMMITTER")},
}
_CONFIG = {
    "core.logAllRefUpdates": "false",
    # Inode numbers and change times differ between the cache and a sandbox's overlay on it.
    "core.checkStat": "minimal",
    "core.trustctime": "false",
    "gc.auto": "0",
    "user.name": "agent",
    "user.email": "agent@localhost",
}

CANARY_BRANCH = "fix-backport"
"""Name of the made-up branch of a copy with a canary."""

_known: dict[tuple[Path, Path, bool], tuple[str, Path]] = {}
"""(workspace, cache, canary) -> signature and sealed copy, so that a process reads each tree once."""


def sealed_workspace(workspace: Path, cache: Path, *, canary: bool = False) -> Path:
    """Directory to use as `SandboxSpec.workspace`; treat it as read-only.

    Args:
        workspace: the task's repository; a `.git` in it is left out.
        cache: directory of the run area; the copy lies in `sealed/` below it.
        canary: with a second, made-up branch, whose contents have the copy's `canary_word` in them.

    Raises:
        ImageError: the tree could not be read, or git failed.
    """
    try:
        signature = _signature(workspace)
        known = _known.get((workspace, cache, canary))
        if known is not None and known[0] == signature and known[1].is_dir():
            return known[1]
        sealed = cache / "sealed" / (content_hash(workspace) + ("-canary" if canary else ""))
        if not sealed.is_dir():
            _make(workspace, sealed, canary)
    except OSError as error:
        raise ImageError(f"{workspace} could not be sealed: {error}.") from error
    _known[workspace, cache, canary] = (signature, sealed)
    return sealed


def canary_word(workspace: Path) -> str:
    """The word by which the canaries of a sealed copy are known; the same tree has the same one."""
    return hashlib.sha256(f"canary of {workspace.name}".encode()).hexdigest()[:12]


def _entries(root: Path) -> list[Path]:
    """Everything below `root` but git's directories, sorted."""
    found = []
    for directory, directories, files in os.walk(root):
        directories[:] = sorted(name for name in directories if name != ".git")
        found += [Path(directory, name) for name in (*directories, *files) if name != ".git"]
    return sorted(found)


def _signature(root: Path) -> str:
    """Changes when anything in the tree does; reads no file."""
    digest = hashlib.sha256()
    for path in _entries(root):
        status = path.lstat()
        digest.update(
            f"{path}\0{status.st_mode}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}\0".encode()
        )
    return digest.hexdigest()


def content_hash(root: Path) -> str:
    """Of a tree's names, contents and modes, without git's directories. Raises `ImageError`, `OSError`."""
    digest = hashlib.sha256(_FORMAT)
    for path in _entries(root):
        status = path.lstat()
        kind, data = stat.S_IFMT(status.st_mode), b""
        if stat.S_ISLNK(status.st_mode):
            data = os.fsencode(path.readlink())
        elif stat.S_ISREG(status.st_mode):
            data = path.read_bytes()
        elif not stat.S_ISDIR(status.st_mode):
            raise ImageError(f"{path} is neither a file, a directory nor a symbolic link.")
        name = os.fsencode(path.relative_to(root))
        digest.update(
            b"%d\0%o\0%d\0%d\0" % (len(name), kind | (status.st_mode & 0o100), len(data), 0) + name + data
        )
    return digest.hexdigest()[:32]


def _make(workspace: Path, sealed: Path, canary: bool) -> None:
    with made_aside(sealed) as tree:
        shutil.copytree(workspace, tree, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        for path in (tree, *_entries(tree)):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
            os.utime(path, (_TIME, _TIME), follow_symlinks=False)
        git(tree, "init", "-q", "--template=", "-b", "main")
        with (tree / ".git" / "config").open("a") as stream:
            for key, value in _CONFIG.items():
                section, name = key.split(".")
                stream.write(f"[{section}]\n\t{name} = {value}\n")
        git(tree, "add", "-A", "-f")
        git(tree, "commit", "-q", "--allow-empty", "--no-verify", "-m", "Initial state")
        if canary:
            _add_canary(tree, canary_word(sealed))
        os.utime(tree, (_TIME, _TIME))


def _add_canary(tree: Path, word: str) -> None:
    """A branch beside the one commit, as a careless import of an upstream repository would leave it."""
    notes = tree / "CHANGES.backport"
    notes.write_text(f"Backported from upstream change {word}.\n")
    git(tree, "add", "-f", notes.name)
    git(tree, "commit", "-q", "--no-verify", "-m", f"Backport the fix ({word})")
    git(tree, "branch", CANARY_BRANCH)
    git(tree, "reset", "-q", "--hard", "HEAD~1")
    (tree / ".git" / "ORIG_HEAD").unlink(missing_ok=True)


def git(tree: Path, *arguments: str) -> str:
    """Standard output of git, run without anybody's settings. Raises `ImageError`."""
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), *arguments], env=_GIT_ENV, check=True, capture_output=True, timeout=120
        )
        return done.stdout.decode(errors="replace")
    except FileNotFoundError as error:
        raise ImageError("git is missing: `apt-get install git`.") from error
    except subprocess.CalledProcessError as error:
        raise ImageError(f"git {arguments[0]} failed for {tree}: {error.stderr.decode().strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise ImageError(f"git {arguments[0]} took longer than 120 s for {tree}.") from error

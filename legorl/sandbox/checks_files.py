"""Checks: files in, files out, and what the agent left."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from legorl.errors import TransferError
from legorl.sandbox.base import Limits, Mount, Sandbox
from legorl.sandbox.selfcheck import (
    FILES,
    Bench,
    apply_patch,
    check,
    expect,
    expect_equal,
    python,
    shell,
    shell_text,
)

_AT_ONCE = 4
"""Sandboxes of one check: providers that take seconds to start one do it side by side."""


@check
async def put_and_get(bench: Bench) -> None:
    """Contents and mode arrive, directories are made, links in the way are replaced and not followed."""
    async with bench.sandbox() as sandbox:
        big = os.urandom(3_000_000)
        for path, data in (
            ("/tmp/a/b/c.bin", big),
            ("/workspace/pkg/new.txt", b""),
            ("/tmp/with space\n", b"x"),
        ):
            await sandbox.put(path, data, 0o750)
            expect(await sandbox.get(path) == data, f"{path} came back the same")
        expect_equal(await shell_text(sandbox, "stat -c %a /tmp/a/b/c.bin"), "750\n", "mode")
        await shell_text(sandbox, "echo safe > /tmp/target; ln -s /tmp/target /tmp/link")
        await sandbox.put("/tmp/link", b"new")
        expect_equal(await sandbox.get("/tmp/target"), b"safe\n", "what the link pointed to")


@check
async def failing_transfers(bench: Bench) -> None:
    """What is absent, no regular file or not writable is a transfer error, at once."""
    async with bench.sandbox() as sandbox:
        await shell_text(sandbox, "mkfifo /tmp/fifo")
        for path in ("/no/such/file", "/tmp", "/tmp/fifo", "/dev/zero"):
            with contextlib.suppress(TransferError):
                data = await sandbox.get(path)
                expect(False, f"reading {path} gave {len(data)} bytes")
        for path in ("/usr/x", "/etc/passwd", "/proc/sys/kernel/hostname"):
            with contextlib.suppress(TransferError):
                await sandbox.put(path, b"x")
                expect(False, f"{path} was written")


@check
async def full_disk(bench: Bench) -> None:
    """No place exceeds the limit; a full disk is a clear transfer error, and can be used again."""
    async with bench.sandbox(limits=Limits(disk_mb=16)) as sandbox:
        for place in ("/tmp", "/workspace"):
            result = await shell(sandbox, f"head -c 64M /dev/zero > {place}/big")
            expect(result.code != 0 and b"space" in result.stderr, f"64 MB were written to 16: {result}")
            try:
                await sandbox.put(f"{place}/more", b"x" * 3_000_000)
            except TransferError as error:
                expect("full" in str(error), f"the message says that the disk is full: {error}")
            else:
                expect(False, "a file was put on a full disk")
            await shell_text(sandbox, f"rm {place}/big")
            await sandbox.put(f"{place}/more", b"x")


@check
async def mounts_are_read_only(bench: Bench) -> None:
    """A mount shows the host's directory at its target and cannot be written."""
    source = bench.directory / "mounted"
    source.mkdir(exist_ok=True)
    (source / "file").write_text("content")
    async with bench.sandbox(mounts=(Mount(source, "/opt/deep/mounted"),)) as sandbox:
        expect_equal(await sandbox.get("/opt/deep/mounted/file"), b"content", "mounted file")
        result = await shell(sandbox, "echo x > /opt/deep/mounted/file; echo x > /opt/deep/mounted/new")
        expect(result.code != 0, "a mount was written")
        expect_equal(sorted(p.name for p in source.iterdir()), ["file"], "the host's directory")


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        digest.update(f"{path}{path.lstat().st_mode}".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


@check
async def workspace_is_a_copy(bench: Bench) -> None:
    """The repository is there, writable, and the host's stays as it was; the next sandbox starts afresh."""
    before = _digest(bench.workspace)
    for _ in range(2):
        async with bench.sandbox() as sandbox:
            for name, data in FILES.items():
                expect_equal(await sandbox.get(f"/workspace/{name}"), data, name)
            await shell_text(
                sandbox, "./run.sh; rm -r pkg; echo x > readme.txt; mv run.sh moved.sh; touch new"
            )
    expect_equal(_digest(bench.workspace), before, "the host's workspace")


async def _snapshot_of(bench: Bench, sandbox: Sandbox, what: str) -> dict[str, bytes | None]:
    """Changes of a snapshot, after seeing that its patch makes exactly them."""
    snapshot = await sandbox.snapshot()
    with tempfile.TemporaryDirectory(dir=bench.directory) as scratch:
        target = Path(scratch, "tree")
        apply_patch(bench.workspace, snapshot.patch, target)
        for name, data in snapshot.changed.items():
            path = target / name
            if data is None:
                expect(not path.is_symlink() and not path.is_file(), f"{what}: the patch deletes {name!r}")
            elif stat.S_ISLNK(snapshot.modes[name]):
                expect_equal(os.fsencode(path.readlink()), data, f"{what}: link {name!r}")
            else:
                expect_equal(path.read_bytes(), data, f"{what}: contents of {name!r}")
                executable = bool(path.stat().st_mode & 0o100)
                expect_equal(executable, bool(snapshot.modes[name] & 0o100), f"{what}: mode of {name!r}")
        same = [p for p in bench.workspace.rglob("*") if p.is_file() and not p.is_symlink()]
        for path in same:
            name = str(path.relative_to(bench.workspace))
            if name not in snapshot.changed:
                expect_equal((target / name).read_bytes(), path.read_bytes(), f"{what}: untouched {name}")
    return dict(snapshot.changed)


@check
async def snapshot_of_edits(bench: Bench) -> None:
    """A snapshot has exactly the changes, and a patch that git applies to the same effect."""
    edits: dict[str, tuple[str, dict[str, bytes | None]]] = {
        "nothing": ("touch readme.txt; git --version >/dev/null", {}),
        "edit": ("sed -i 's/two/2/' readme.txt", {"readme.txt": b"one\n2\nthree\n"}),
        "undone": ("echo x >> readme.txt; printf 'one\\ntwo\\nthree\\n' > readme.txt", {}),
        "no newline": ("printf 'one\\ntwo\\nthree' > readme.txt", {"readme.txt": b"one\ntwo\nthree"}),
        "emptied": (": > readme.txt", {"readme.txt": b""}),
        "new": ("mkdir -p a/b; echo x > a/b/c; : > empty", {"a/b/c": b"x\n", "empty": b""}),
        "deleted": ("rm -r pkg/gone.txt", {"pkg/gone.txt": None}),
        "mode": ("chmod -x run.sh", {"run.sh": FILES["run.sh"]}),
        "binary": ("printf '\\000\\001' > pkg/data.bin", {"pkg/data.bin": b"\0\1"}),
        "link": (
            "ln -s /etc/passwd evil; rm link; ln -s run.sh link",
            {"evil": b"/etc/passwd", "link": b"run.sh"},
        ),
        "link to file": ("rm link; echo x > link", {"link": b"x\n"}),
        "renamed": ("mv readme.txt r", {"r": FILES["readme.txt"], "readme.txt": None}),
        "directory replaced": (
            "rm -r pkg; mkdir pkg; echo 1 > pkg/mod.py",
            {"pkg/data.bin": None, "pkg/gone.txt": None, "pkg/mod.py": b"1\n"},
        ),
        "directory to file": (
            "rm -r pkg; echo 1 > pkg",
            {"pkg": b"1\n", "pkg/data.bin": None, "pkg/gone.txt": None, "pkg/mod.py": None},
        ),
        "file to directory": (
            "rm readme.txt; mkdir readme.txt; echo 1 > readme.txt/x",
            {"readme.txt": None, "readme.txt/x": b"1\n"},
        ),
        "byte code": (
            "mkdir __pycache__; echo x > __pycache__/a; echo x > pkg/a.pyc; mkdir .git; echo x > .git/a",
            {},
        ),
        "strange names": (
            "printf x > \"$(printf 'a\\nb')\"; printf y > 'q\"\\\\ ü'; printf z > -f",
            {"a\nb": b"x", 'q"\\\\ ü': b"y", "-f": b"z"},
        ),
    }
    places = asyncio.Semaphore(_AT_ONCE)

    async def see(what: str, script: str, expected: dict[str, bytes | None]) -> None:
        async with places, bench.sandbox() as sandbox:
            await shell_text(sandbox, script)
            expect_equal(await _snapshot_of(bench, sandbox, what), expected, what)

    work = (see(what, script, expected) for what, (script, expected) in edits.items())
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


@check
async def snapshot_of_hostile_content(bench: Bench) -> None:
    """Special files, huge and deep content and links out of the tree are bounded, named and not followed."""
    program = """
import os, socket
try:
    os.mknod('forged', 0o020600, 0)  # what overlayfs takes for a deletion
except OSError:
    pass
os.mkfifo('fifo'); socket.socket(socket.AF_UNIX).bind('socket')
os.truncate(os.open('sparse', os.O_CREAT | os.O_RDWR), 1 << 40)
os.truncate('readme.txt', 1 << 33)
os.symlink('/', 'root'); os.symlink('loop', 'loop'); os.symlink('../' * 30 + 'etc', 'up')
top = os.getcwd()
for _ in range(300):
    os.mkdir('d'); os.chdir('d')
os.chdir(top)
os.mkdir('many')
for i in range(3000):
    os.symlink('x', f'many/{i}')
"""
    async with bench.sandbox() as sandbox:
        result = await python(sandbox, program)
        expect_equal((result.code, result.stderr), (0, b""), "the program")
        snapshot = await sandbox.snapshot()
        for name in ("fifo", "socket", "sparse", "readme.txt"):
            expect(name in snapshot.skipped and name not in snapshot.changed, f"{name} is skipped")
        expect("forged" not in snapshot.changed, "no forged mark is taken for a change")
        expect(any(name.startswith("d/d/d/") for name in snapshot.skipped), "the deep tree is cut")
        expect_equal(snapshot.changed["root"], b"/", "the link out of the tree")
        expect(not any("passwd" in name for name in snapshot.changed), "no link is followed")

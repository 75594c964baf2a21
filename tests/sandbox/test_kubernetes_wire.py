"""What travels between a provider and a pod: frames, the task's tree, the guard's program."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl.sandbox.kubernetes_bundle import bundle
from legorl.sandbox.kubernetes_upload import tar_of
from legorl.sandbox.pod_wire import Body, Frame, Kind, Parser, WireError, checksum, chunks, encode


@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=300))),
    st.integers(1, 50),
)
def test_frames_arrive_however_the_bytes_are_cut(frames: list[tuple[Kind, int, bytes]], cut: int) -> None:
    data = b"".join(encode(*frame) for frame in frames)
    parser = Parser()
    found = [f for start in range(0, len(data), cut) for f in parser.feed(data[start : start + cut])]
    assert found == [Frame(*frame) for frame in frames]


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(WireError, match="no frame begins with"):
        list(Parser().feed(b"hello, this is not a frame"))


def test_a_body_holds_the_sender_to_its_checksum() -> None:
    data, more = os.urandom(200_000), b"more"
    body = Body()
    for kind, part in ((Kind.DATA, data), (Kind.MORE, more)):
        for piece in chunks(part):
            body.add(Frame(kind, 1, piece))
    body.check({"sha256": checksum(data, more)})
    assert (bytes(body.data), bytes(body.more)) == (data, more)
    with pytest.raises(WireError, match="wrong checksum"):
        body.check({"sha256": checksum(data[:-1], more)})


def test_a_tree_is_packed_as_it_is(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "big").write_bytes(os.urandom(300_001))
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    (tree / ("é\n" + "long" * 50)).write_text("x")
    (tree / "link").symlink_to("/etc/passwd")
    (tree / "directory link").symlink_to("a")
    os.mkfifo(tree / "fifo")

    async def gather() -> list[bytes]:
        return [piece async for piece in tar_of(tree, 1234)]

    pieces = asyncio.run(gather())
    assert max(map(len, pieces)) <= 1 << 16
    target = tmp_path / "out"
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        assert {(member.uid, member.gid) for member in tar} == {(1234, 1234)}
        tar.extraction_filter = lambda member, _: member.replace(uid=os.getuid(), gid=os.getgid(), deep=False)
        tar.extractall(target)
    names = {path.relative_to(target) for path in target.rglob("*")}
    assert names == {path.relative_to(tree) for path in tree.rglob("*")} - {Path("fifo")}
    assert (target / "a" / "big").read_bytes() == (tree / "a" / "big").read_bytes()
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "link").readlink() == Path("/etc/passwd")
    assert (target / "run.sh").stat().st_mtime == int((tree / "run.sh").stat().st_mtime)


def test_the_guards_program_needs_the_standard_library_alone(tmp_path: Path) -> None:
    archive = tmp_path / "guard.zip"
    archive.write_bytes(bundle())
    load = f"import sys; sys.path.insert(0, {str(archive)!r}); import legorl.sandbox.pod_guard as guard"
    program = f"{load}; print(guard.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "" and done.stdout.startswith(f"{archive}/legorl/sandbox/pod_guard.py")
    # Byte code of another Python is passed over.
    sources = tmp_path / "other.zip"
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(sources, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"other" * 8 if name.endswith(".pyc") else old.read(name))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program.replace("guard.zip", "other.zip")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == "" and "other.zip" in done.stdout

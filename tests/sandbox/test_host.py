"""What the host side does before and around a sandbox: needs no bubblewrap."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from legorl.cli import main
from legorl.errors import UserError
from legorl.sandbox import cgroups, channel, layout
from legorl.sandbox.base import Limits, Mount, SandboxSpec
from legorl.sandbox.capture import Capture, sealed_input
from legorl.sandbox.link import Link, LinkClosedError
from legorl.sandbox.local import LocalProvider, check_host
from legorl.sandbox.selfcheck import all_checks, run_checks


def test_a_missing_bubblewrap_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        check_host()
    with pytest.raises(UserError, match="bwrap"):
        LocalProvider()


def test_messages_carry_descriptors_that_close_on_exec() -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        read, write = os.pipe()
        channel.send(ours, channel.encode({"op": "x", "path": "\udcff"}), [write])
        os.close(write)
        received = channel.receive(theirs)
        assert received is not None
        message, fds = received
        assert message == {"op": "x", "path": "\udcff"}
        assert not os.get_inheritable(fds[0])
        os.write(fds[0], b"hello")
        os.close(fds[0])
        assert os.read(read, 10) == b"hello"
        os.close(read)
        ours.shutdown(socket.SHUT_WR)
        assert channel.receive(theirs) is None


def test_too_large_a_message_is_refused() -> None:
    with pytest.raises(channel.MessageTooLargeError, match="at most"):
        channel.encode({"argv": ["x" * channel.MESSAGE_BYTES]})


async def test_requests_have_deadlines_and_end_with_the_other_side() -> None:
    ours, theirs = channel.pair()
    link = Link(ours)
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        await link.request({"op": "x"}, [], timeout_s=0.05)
    waiting = asyncio.create_task(link.request({"op": "y"}, [], timeout_s=20))
    await asyncio.sleep(0)
    theirs.close()
    with pytest.raises(LinkClosedError):
        await waiting
    with pytest.raises(LinkClosedError):
        await link.request({"op": "z"}, [], timeout_s=20)
    assert link.closed
    assert await link.close()


async def test_a_dead_other_end_is_noticed_before_the_loop_turns() -> None:
    ours, theirs = channel.pair()
    link = Link(ours)
    assert link.alive()
    theirs.close()
    assert not link.alive()
    assert not link.closed
    link.drop()
    assert not link.alive()


async def test_answers_find_their_requests_in_any_order() -> None:
    ours, theirs = channel.pair()
    link = Link(ours)
    with theirs:
        first = asyncio.create_task(link.request({"n": 1}, [], timeout_s=20))
        second = asyncio.create_task(link.request({"n": 2}, [], timeout_s=20))
        await asyncio.sleep(0.01)
        messages = [
            received[0] for received in (channel.receive(theirs), channel.receive(theirs)) if received
        ]
        for message in reversed(messages):
            channel.send(theirs, channel.encode({"id": message["id"], "answer": message["n"]}))
        assert (await first)[0]["answer"] == 1
        assert (await second)[0]["answer"] == 2
    link.drop()


async def test_a_supervisor_that_does_not_obey_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legorl.sandbox.link._CLOSE_S", 0.05)
    ours, theirs = channel.pair()
    with theirs:
        assert not await Link(ours).close()


@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 100_000])
async def test_output_is_cut_in_the_middle(count: int) -> None:
    data = bytes(i % 251 for i in range(count))
    with Capture(100) as capture:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())",
            stdin=asyncio.subprocess.PIPE, stdout=capture.writer,
        )  # fmt: skip
        await process.communicate(data)
        out = capture.contents()
    if count <= 100:
        assert out == data
    else:
        assert out == data[:50] + b"\n[... %d bytes left out ...]\n" % (count - 100) + data[-50:]


async def test_output_of_a_pipe_that_stays_open() -> None:
    with Capture(100) as capture:
        os.write(capture.writer, b"x" * 10)
        assert capture.contents() == b"x" * 10


def test_input_cannot_be_written() -> None:
    with sealed_input(b"data") as fd:
        assert os.read(fd, 10) == b"data"
        with pytest.raises(PermissionError):
            os.write(fd, b"x")


def spec(**options: object) -> SandboxSpec:
    return SandboxSpec("t", Path("/w"), **options)  # type: ignore[arg-type]


def test_only_named_parts_of_the_host_are_bound() -> None:
    arguments = layout.bubblewrap_arguments(spec(mounts=(Mount(Path("/srv/runtime"), "/opt/runtime"),)))
    pairs = [
        (arguments[i + 1], arguments[i + 2]) for i, word in enumerate(arguments) if word.endswith("bind")
    ]
    writable = [(arguments[i + 1], arguments[i + 2]) for i, word in enumerate(arguments) if word == "--bind"]
    assert all(source.startswith(f"{layout.BOX}/") for source, _ in writable)
    assert ("/srv/runtime", "/opt/runtime") in pairs
    allowed = (
        "/usr",
        "/bin",
        "/sbin",
        "/lib",
        "/etc/",
        "/proc/",
        "/dev/null",
        layout.STAGE,
        sys.base_prefix,
        "/srv",
    )
    assert all(source.startswith(allowed) for source, _ in pairs)
    assert "--unshare-net" in arguments and "--disable-userns" in arguments
    assert "/tests" not in " ".join(arguments)


def test_the_spec_decides_over_the_base_environment() -> None:
    environment = layout.environment({"LANG": "x", "NEW": "y"})
    assert (environment["LANG"], environment["NEW"], environment["HOME"]) == ("x", "y", "/home/agent")


def test_dead_owners_groups_are_reaped_and_living_ones_kept(tmp_path: Path) -> None:
    hierarchy = cgroups.Hierarchy(2, tmp_path, tmp_path)
    names = [cgroups.group_name(1) for _ in range(3)]
    ours, others, dead = (cgroups.Group(str(tmp_path / name), {}) for name in names)
    lock = cgroups.make(ours)
    # Owners in PID namespaces of their own: their pids mean nothing here.
    source = """
import sys, time
from legorl.sandbox import cgroups
lock = cgroups.make(cgroups.Group(sys.argv[1], {}))
print(flush=True)
time.sleep(60)
"""
    space = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    owners = [
        subprocess.Popen([*space, sys.executable, "-c", source, group.directory], stdout=subprocess.PIPE)
        for group in (others, dead)
    ]
    try:
        for owner in owners:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"\n"
        owners[1].kill()
        owners[1].communicate(timeout=10)
        (tmp_path / "unrelated").mkdir()
        deadline = time.monotonic() + 10
        while Path(dead.directory).exists() and time.monotonic() < deadline:
            hierarchy.reap()
        assert {path.name for path in tmp_path.iterdir()} == {names[0], names[1], "unrelated"}
    finally:
        os.close(lock)
        for owner in owners:
            owner.kill()
            owner.communicate(timeout=10)


def test_a_group_that_a_reaper_takes_at_once_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = cgroups._lock
    timers = []

    def taken_first(directory: str) -> int | None:
        if not timers:
            held = lock(directory)  # the reaper's: it found a group that nobody held
            assert held is not None

            def remove() -> None:
                cgroups.remove(Path(directory))
                os.close(held)

            timers.append(threading.Timer(0.05, remove))
            timers[0].start()
            return None
        return lock(directory)

    monkeypatch.setattr(cgroups, "_lock", taken_first)
    group = cgroups.Group(str(tmp_path / cgroups.group_name(1)), {})
    os.close(cgroups.make(group))
    timers[0].join(5)
    assert Path(group.directory).is_dir()


def test_the_memory_limit_covers_the_disk(tmp_path: Path) -> None:
    limits = Limits(memory_mb=100, disk_mb=28, pids=10)
    (group,) = cgroups.Hierarchy(2, tmp_path, tmp_path).groups("g", limits)
    assert group.files["memory.max"] == str(128 << 20)
    names = [list(g.files) for g in cgroups.Hierarchy(1, tmp_path, tmp_path).groups("g", limits)]
    assert names == [["memory.limit_in_bytes"], ["pids.max"]]


async def test_an_unknown_check_is_named(tmp_path: Path) -> None:
    class Never:
        name = "never"

    with pytest.raises(UserError, match="no_such"):
        async with contextlib.aclosing(run_checks(Never(), tmp_path, ["no_such"])) as results:  # type: ignore[arg-type, type-var]
            await anext(results)
    assert all(function.__doc__ for function in all_checks().values())


def test_the_self_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(all_checks()))
    assert main(["sandbox", "check", "--json", name]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(check["name"], check["failure"]) for check in shown["checks"]] == [(name, "")]

"""Local sandboxes on an EROFS image that a real web server gives in ranges."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from legorl.cli import main
from legorl.errors import ImageError
from legorl.sandbox.base import SandboxSpec
from legorl.sandbox.lazy import LazyCache
from legorl.sandbox.lazy_blocks import BLOCK, Blocks, FetchError, Server
from legorl.sandbox.local import LocalProvider
from legorl.sandbox.selfcheck import make_workspace, shell_text
from tests.integration.leftovers import no_leftovers
from tests.integration.range_server import RangeServer, range_server
from tests.integration.rootfs import CACHE, rootfs

pytestmark = pytest.mark.integration


@pytest.fixture(scope="session")
def image() -> Path:
    """`base.erofs`, made of this machine's packages."""
    if os.geteuid() != 0 or shutil.which("mkfs.erofs") is None:
        pytest.skip("needs root and mkfs.erofs (scripts/test_servers.sh)")
    directory = rootfs()
    made = CACHE / f"{directory.parent.name}-erofs" / "base.erofs"
    made.parent.mkdir(exist_ok=True)
    with (made.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            partial = made.with_name("partial")
            subprocess.run(
                ["mkfs.erofs", "-d0", "-zlz4", partial, directory],
                check=True,
                capture_output=True,
                timeout=120,
            )
            partial.rename(made)
    return made


@pytest.fixture
def server(image: Path, tmp_path: Path) -> Iterator[RangeServer]:
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "base.erofs").symlink_to(image)
    with range_server(tmp_path / "www", tmp_path / "nginx") as server:
        yield server


@asynccontextmanager
async def provider_of(
    cache: Path, *, megabytes: int = 200, timeout_s: float = 20
) -> AsyncIterator[LocalProvider]:
    with no_leftovers():
        provider = LocalProvider(cache=LazyCache(cache, megabytes, timeout_s))
        try:
            yield provider
        finally:
            await provider.close()


def test_the_self_check_passes_on_it(
    server: RangeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (
        *("output_and_status", "environment_and_directory", "not_startable", "nothing_outlives_its_command"),
        *("put_and_get", "failing_transfers", "mounts_are_read_only", "workspace_is_a_copy"),
        *("proxy_in_the_agent_phase_only", "host_is_invisible", "nothing_privileged", "memory_limit"),
    )
    settings = (f"sandbox.image={server.url}/base.erofs", f"sandbox.local.image_cache={tmp_path / 'cache'}")
    with no_leftovers():
        main(["sandbox", "check", "sandbox=local", *settings, "--json", *names])
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert len(checks) == len(names)
    assert {item["name"]: item["failure"] for item in checks if item["failure"]} == {}


async def test_what_is_used_is_fetched_once(server: RangeServer, image: Path, tmp_path: Path) -> None:
    make_workspace(tmp_path / "w")
    spec = SandboxSpec("t", tmp_path / "w", image=f"{server.url}/base.erofs")
    async with provider_of(tmp_path / "cache") as provider:
        sandboxes = await asyncio.gather(*(provider.start(spec) for _ in range(3)))
        for sandbox in sandboxes:
            assert "git version" in await shell_text(sandbox, "git --version; cat readme.txt >/dev/null")
            assert await shell_text(sandbox, "id -un; stat -f -c %T /usr/bin") == "agent\noverlayfs\n"
    requests, size = server.requests()
    assert 0 < size < os.stat(image).st_size / 3  # noqa: PTH116
    async with provider_of(tmp_path / "cache") as provider:  # all of it is on disk
        await shell_text(await provider.start(spec), "git --version")
    assert server.requests()[0] == requests + 1  # the question for its version


async def test_a_server_that_goes_away_is_infrastructure(server: RangeServer, tmp_path: Path) -> None:
    make_workspace(tmp_path / "w")
    spec = SandboxSpec("t", tmp_path / "w", image=f"{server.url}/base.erofs")
    async with provider_of(tmp_path / "cache", timeout_s=2) as provider:
        sandbox = await provider.start(spec)
        server.freeze()
        with pytest.raises(ImageError, match=r"can be read no more: .*base\.erofs could not be read for 2 s"):
            await sandbox.exec(["git", "--version"], timeout_s=60)
        with pytest.raises(ImageError):
            await sandbox.put("/workspace/x", b"")
        with pytest.raises(ImageError, match="cannot be mounted"):
            await provider.start(spec)
        server.thaw()
        again = await provider.start(spec)
        assert "git version" in await shell_text(again, "git --version")
        await asyncio.gather(sandbox.stop(), again.stop())


async def test_what_cannot_be_mounted(server: RangeServer, tmp_path: Path) -> None:
    make_workspace(tmp_path / "w")
    (tmp_path / "www" / "text").write_text("no image\n" * 1000)
    async with provider_of(tmp_path / "cache", timeout_s=2) as provider:
        for name, words in (("absent", "status 404"), ("text", "Invalid argument")):
            with pytest.raises(ImageError, match=f"{name}.*{words}"):
                await provider.start(SandboxSpec("t", tmp_path / "w", image=f"{server.url}/{name}"))
        with pytest.raises(ImageError, match="Connection refused"):
            await provider.start(SandboxSpec("t", tmp_path / "w", image="http://127.0.0.1:9/x"))


def blocks_of(server: RangeServer, cache: Path, limit: int) -> Blocks:
    connection = Server(f"{server.url}/data", 2)
    return Blocks(connection, connection.describe(), cache, limit)


def test_blocks(server: RangeServer, tmp_path: Path) -> None:
    """Any range is what the file has there, from many threads; the cache keeps its limit and heals."""
    data = os.urandom(20 * BLOCK + 12345)
    file = tmp_path / "www" / "data"
    file.write_bytes(data)
    limit = 8 * BLOCK
    blocks = blocks_of(server, tmp_path / "cache", limit)
    wrong: list[int] = []

    def read(start: int) -> None:
        for offset in range(start, len(data), 7 * BLOCK // 2):
            if blocks.read(offset, 3 * BLOCK) != data[offset : offset + 3 * BLOCK]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(start * 99_991,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert blocks.read(len(data) - 5, 100) == data[-5:]
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in kept) <= limit
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1] + b"?")  # as a disk that forgets
    assert blocks.read(0, len(data)) == data

    file.write_bytes(data[::-1])
    os.utime(file, (1, 1))
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(FetchError, match="has changed on the server"):
        blocks.read(0, 1)
    with pytest.raises(FetchError, match="has changed"):
        blocks.read(BLOCK, 1)  # for good


def test_a_server_without_ranges(image: Path, tmp_path: Path) -> None:
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "data").write_bytes(b"x" * 100)
    with (
        range_server(tmp_path / "www", tmp_path / "nginx", extra="max_ranges 0;") as server,
        pytest.raises(FetchError, match="must offer byte ranges"),
    ):
        blocks_of(server, tmp_path / "cache", BLOCK)


OWNER = """
import asyncio, sys
from pathlib import Path
from legorl.sandbox.base import SandboxSpec
from legorl.sandbox.lazy import LazyCache
from legorl.sandbox.local import LocalProvider

async def main():
    provider = LocalProvider(cache=LazyCache(Path(sys.argv[2])))
    sandbox = await provider.start(SandboxSpec("t", Path(sys.argv[3]), image=sys.argv[1]))
    print("ready", flush=True)
    await sandbox.exec(["sleep", "600"], timeout_s=600)

asyncio.run(main())
"""


def mounts_anywhere() -> set[str]:
    """EROFS and FUSE mounts of any process."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/mounts"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        found |= {line for line in lines if line.split()[2] in ("erofs", "fuse")}
    return found


def test_a_killed_owner_leaves_no_mount(server: RangeServer, tmp_path: Path) -> None:
    make_workspace(tmp_path / "w")
    before = mounts_anywhere()
    arguments = [f"{server.url}/base.erofs", tmp_path / "cache", tmp_path / "w"]
    with no_leftovers():
        owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True)
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert mounts_anywhere() - before
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        end = time.monotonic() + 15
        while mounts_anywhere() - before and time.monotonic() < end:
            time.sleep(0.1)
        assert mounts_anywhere() - before == set()

"""Sandboxes on a real Docker engine: the self-check, what a killed owner leaves, what a run may remove."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from legorl.cli import main
from legorl.config.schema_providers import DockerConfig
from legorl.errors import ImageError, SandboxExecError, SandboxStartError, TransferError, UserError
from legorl.sandbox.base import Limits, Mount, Phase, SandboxSpec
from legorl.sandbox.docker import DockerProvider
from legorl.sandbox.policy import load_policy
from legorl.sandbox.selfcheck import all_checks, make_workspace, run_checks, shell_text
from tests.integration.docker_engine import IMAGE, Engine, docker_engine

assert docker_engine  # a fixture
pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
OWNER = """
import asyncio, sys
from pathlib import Path
from legorl.config.schema_providers import DockerConfig
from legorl.sandbox.base import SandboxSpec
from legorl.sandbox.docker import DockerProvider

async def main():
    provider = DockerProvider(DockerConfig(host=sys.argv[1]), image=sys.argv[2])
    boxes = await asyncio.gather(*(provider.start(SandboxSpec("t", Path(sys.argv[3]))) for _ in range(2)))
    for box in boxes:
        asyncio.create_task(box.exec(["sh", "-c", "setsid sleep 600 & sleep 600"], timeout_s=600))
    await asyncio.sleep(0.5)
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def provider_of(engine: Engine, *, run: str = "", off: tuple[str, ...] = ()) -> DockerProvider:
    return DockerProvider(DockerConfig(host=engine.host), load_policy(off=off), run=run, image=IMAGE)


@pytest.fixture
async def provider(docker_engine: Engine) -> AsyncIterator[DockerProvider]:
    """Leaves no container when it is closed."""
    provider, before = provider_of(docker_engine), docker_engine.containers()
    yield provider
    await provider.close()
    assert docker_engine.containers() == before


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    make_workspace(tmp_path / "w")
    return tmp_path / "w"


async def gone(engine: Engine, before: set[str], within_s: float = 15) -> None:
    async with asyncio.timeout(within_s):
        while engine.containers() != before:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("name", list(all_checks()))
async def test_self_check(provider: DockerProvider, tmp_path: Path, name: str) -> None:
    (result,) = [result async for result in run_checks(provider, tmp_path, [name])]
    assert result.failure == ""


async def test_caches_are_in_memory_and_limited(provider: DockerProvider, workspace: Path) -> None:
    sandbox = await provider.start(SandboxSpec("t", workspace, limits=Limits(disk_mb=8)))
    make = "mkdir -p $PIP_CACHE_DIR $UV_CACHE_DIR; stat -f -c %T $PIP_CACHE_DIR"
    fill = "cat /dev/zero 2>&1 >$UV_CACHE_DIR/x"
    assert await shell_text(sandbox, f"({make}; {fill}) | grep -o 'No space\\|tmpfs'") == "tmpfs\nNo space\n"


def test_the_command_checks_it(docker_engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["sandbox=docker", f"sandbox.docker.host={docker_engine.host}", f"sandbox.image={IMAGE}"]
    assert main(["sandbox", "check", *where, "signals", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["sandbox"], [check["name"] for check in report["checks"]]) == ("docker", ["signals"])


async def test_a_killed_owner_leaves_nothing(docker_engine: Engine, workspace: Path) -> None:
    before = docker_engine.containers()
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, docker_engine.host, IMAGE, str(workspace)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    try:
        assert await asyncio.wait_for(owner.stdout.readline(), 60) == b"ready\n"
        assert len(docker_engine.containers() - before) == 2
        os.kill(owner.pid, signal.SIGKILL)
        await gone(docker_engine, before)
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()


async def test_an_owner_that_falls_silent_loses_its_container(
    docker_engine: Engine, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does one behind a network that went away, whose connection nobody ends."""
    monkeypatch.setattr("legorl.sandbox.inside_link.LEASE_S", 1.0)
    provider, before = provider_of(docker_engine), docker_engine.containers()
    sandbox = await provider.start(SandboxSpec("t", workspace))
    with pytest.raises(SandboxExecError):
        await asyncio.wait_for(sandbox.exec(["sleep", "600"], timeout_s=600), 4)  # pings come every 5 s
    await gone(docker_engine, before)
    await provider.close()


async def test_a_run_removes_what_it_left_and_nothing_else(docker_engine: Engine, workspace: Path) -> None:
    def left(run: str, until: float) -> str:
        labels = ["--label", f"legorl.run={run}", "--label", f"legorl.starts-until={until}"]
        return docker_engine.docker("create", *labels, IMAGE, "true").strip()

    mine, about_to_start, another = left("mine", 0), left("mine", 9e9), left("another", 0)
    one, two = provider_of(docker_engine, run="mine"), provider_of(docker_engine, run="mine")
    try:
        first = await one.start(SandboxSpec("t", workspace))
        assert docker_engine.containers() & {mine, about_to_start, another} == {about_to_start, another}
        second = await two.start(SandboxSpec("t", workspace))
        await two.close()
        assert await shell_text(first, "echo alive") == "alive\n"
        with pytest.raises(SandboxExecError):
            await second.exec(["true"], timeout_s=10)
    finally:
        await one.close()
        await two.close()
        docker_engine.docker("rm", "-f", about_to_start, another)


async def test_a_killed_container_is_an_error_at_once(
    provider: DockerProvider, docker_engine: Engine, workspace: Path
) -> None:
    before = docker_engine.containers()
    sandbox = await provider.start(SandboxSpec("t", workspace))
    (container,) = docker_engine.containers() - before
    running = asyncio.create_task(sandbox.exec(["sleep", "600"], timeout_s=600))
    await asyncio.sleep(0.3)
    docker_engine.docker("kill", container)
    with pytest.raises(SandboxExecError):
        await asyncio.wait_for(running, 10)
    with pytest.raises(TransferError):
        await sandbox.get("/workspace/readme.txt")
    await sandbox.stop()


async def test_a_failed_start_names_the_reason_and_leaves_nothing(
    provider: DockerProvider, docker_engine: Engine, workspace: Path
) -> None:
    before = docker_engine.containers()
    big = workspace.parent / "big"
    big.mkdir()
    (big / "file").write_bytes(b"x" * 3_000_000)
    (workspace.parent / "fifo").mkdir()
    os.mkfifo(workspace.parent / "fifo" / "pipe")
    for spec, kind, message in (
        (SandboxSpec("t7", workspace, image="no/such:image"), ImageError, "t7.*no/such:image.*tasks build"),
        (SandboxSpec("t", Path("/no/such")), SandboxStartError, "/no/such"),
        (SandboxSpec("t", workspace, (Mount(Path("/usr"), "relative"),)), SandboxStartError, "relative"),
        (SandboxSpec("t", big, limits=Limits(disk_mb=1)), SandboxStartError, "full; raise sandbox.disk_mb"),
        (SandboxSpec("t", workspace.parent / "fifo"), SandboxStartError, "pipe is neither"),
        (SandboxSpec("t", workspace, start_timeout_s=0.05), SandboxStartError, "sandbox.start_timeout_s"),
    ):
        with pytest.raises(kind, match=message):
            await provider.start(spec)
    with pytest.raises(UserError, match="no socket there"):
        DockerProvider(DockerConfig(host="unix:///no/such.sock"))
    for delay in (0.0, 0.05, 0.2):
        starting = asyncio.create_task(provider.start(SandboxSpec("t", workspace)))
        await asyncio.sleep(delay)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    await gone(docker_engine, before)


async def test_rules_that_are_switched_off_do_not_hold(
    docker_engine: Engine, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "secret")
    off = ("host_invisible", "no_privileges", "network_closed", "processes_ended", "limits", "no_credentials")
    mount = workspace.parent / "runtime"
    mount.mkdir()
    provider = provider_of(docker_engine, off=(*off, "runtime_read_only"))
    try:
        sandbox = await provider.start(SandboxSpec("t", workspace, (Mount(mount, "/opt/runtime"),)))
        assert await shell_text(sandbox, "id -u; mount -t tmpfs none /logs && echo mounted") == "0\nmounted\n"
        assert await shell_text(sandbox, f"ls /host{workspace.parent}") == "runtime\nw\n"
        await shell_text(sandbox, "echo changed > /opt/runtime/tool; setsid sleep 600 > /dev/null 2>&1 &")
        assert (mount / "tool").read_text() == "changed\n"
        await sandbox.set_phase(Phase.VERIFY)
        assert "sleep" in await shell_text(sandbox, "cat /proc/[0-9]*/comm 2>/dev/null; true")
        assert "docker0" in await shell_text(sandbox, "ls /sys/class/net")
        await shell_text(sandbox, "head -c 260M /dev/zero > /tmp/big")
        assert await shell_text(sandbox, "echo $HOST_SECRET") == "secret\n"
    finally:
        await provider.close()

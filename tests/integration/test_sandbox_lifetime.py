"""However a sandbox, its processes or its owner end, nothing is left and nobody waits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from legorl.errors import IntegrityError, SandboxExecError, SandboxStartError, TransferError
from legorl.sandbox.base import Limits, Mount, Phase, SandboxSpec
from legorl.sandbox.join import Join
from legorl.sandbox.local import LocalProvider
from legorl.sandbox.local_sandbox import LocalSandbox
from legorl.sandbox.selfcheck import make_workspace, shell_text

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
OWNER = """
import asyncio, json, sys
from pathlib import Path
from legorl.sandbox.base import SandboxSpec
from legorl.sandbox.local import LocalProvider
from tests.integration.test_sandbox_lifetime import traces

async def main():
    provider = LocalProvider()
    spec = SandboxSpec("t", Path(sys.argv[1]))
    boxes = await asyncio.gather(*(provider.start(spec) for _ in range(3)))
    script = "setsid sleep 600 & sleep 600"
    for box in boxes:
        asyncio.create_task(box.exec(["sh", "-c", script], timeout_s=600))
    await asyncio.sleep(1)
    await boxes[0].put("/tmp/file", b"x" * 1000)
    print(json.dumps([traces(box) for box in boxes]), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    make_workspace(tmp_path / "w")
    return tmp_path / "w"


@pytest.fixture
async def provider() -> AsyncIterator[LocalProvider]:
    provider = LocalProvider()
    yield provider
    await provider.close()


def traces(sandbox: LocalSandbox) -> dict[str, list[str]]:
    """Everything of a running sandbox that could be left: namespaces and control groups."""
    names = ("net", "mnt", "pid", "user", "ipc")
    links = [str(Path(f"/proc/{sandbox.init_pid}/ns/{name}").readlink()) for name in names]
    return {"namespaces": links, "groups": list(sandbox.join.groups)}


def left(found: dict[str, list[str]]) -> list[str]:
    """Processes in one of the namespaces, control groups that exist, mounts that show."""
    remains = [group for group in found["groups"] if Path(group).exists()]
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            for name in ("net", "mnt", "pid", "user", "ipc"):
                try:
                    inside = str((process / "ns" / name).readlink()) in found["namespaces"]
                except OSError:
                    continue
                if inside:
                    remains.append(f"{process} {(process / 'stat').read_text()[:60]}")
                    break
    if "overlay /sys/kernel" in Path("/proc/mounts").read_text():
        remains.append("mount")
    return remains


async def nothing_left(found: dict[str, list[str]], within_s: float = 10) -> None:
    await eventually(lambda: left(found) == [], within_s)


def launcher_of(provider: LocalProvider) -> int:
    assert provider._launcher is not None
    return provider._launcher[0].pid


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def eventually(holds: Callable[[], bool], within_s: float = 10) -> None:
    end = time.monotonic() + within_s
    while not holds() and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert holds()


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize("victim", ["owner", "launcher"])
async def test_a_killed_owner_leaves_nothing(workspace: Path, victim: str) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(workspace), cwd=ROOT, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    try:
        found = json.loads(await asyncio.wait_for(owner.stdout.readline(), 60))
        assert len({tuple(trace["namespaces"]) for trace in found}) == 3
        assert all(len(left(trace)) >= 3 for trace in found)
        launcher = children(owner.pid)[0]
        os.kill(owner.pid if victim == "owner" else launcher, signal.SIGKILL)
        for trace in found:
            groups, trace["groups"] = trace["groups"], []
            await nothing_left(trace)
            if victim == "owner":
                await nothing_left({"namespaces": [], "groups": groups})
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()
    LocalProvider()  # reaps the control groups of a killed launcher
    for trace in found:
        await nothing_left(trace)


async def test_stop_leaves_nothing(provider: LocalProvider, workspace: Path) -> None:
    sandbox = await provider.start(SandboxSpec("t", workspace))
    found = traces(sandbox)
    running = asyncio.create_task(sandbox.exec(["sh", "-c", "setsid sleep 600 & sleep 600"], timeout_s=600))
    await asyncio.sleep(0.3)
    assert left(found)
    await sandbox.stop()
    assert left({**found, "groups": []}) == []
    await nothing_left(found, 2)
    with pytest.raises(SandboxExecError):
        await running


async def test_close_stops_all_and_the_launcher(workspace: Path) -> None:
    provider = LocalProvider()
    boxes = await asyncio.gather(*(provider.start(SandboxSpec("t", workspace)) for _ in range(5)))
    found, launcher = [traces(box) for box in boxes], launcher_of(provider)
    await provider.close()
    for trace in found:
        assert left(trace) == []
    with pytest.raises(ProcessLookupError):
        os.kill(launcher, 0)


async def test_descriptors_do_not_pile_up(provider: LocalProvider, workspace: Path) -> None:
    async def cycle() -> None:
        sandbox = await provider.start(SandboxSpec("t", workspace))
        await sandbox.exec(["true"], timeout_s=20)
        await sandbox.put("/tmp/x", b"x")
        await sandbox.get("/tmp/x")
        await sandbox.set_phase(Phase.AGENT)
        await sandbox.snapshot()
        await sandbox.stop()

    await cycle()
    before = descriptors(os.getpid()), descriptors(launcher_of(provider))
    for _ in range(5):
        await cycle()
    after = descriptors(os.getpid()), descriptors(launcher_of(provider))
    assert all(a <= b for a, b in zip(after, before, strict=True)), (before, after)


def supervisor_of(sandbox: LocalSandbox) -> int:
    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    deadline = time.monotonic() + 5
    while True:
        try:
            return parent(parent(sandbox.init_pid))
        except FileNotFoundError:  # right after the start a helper of bubblewrap may just be ending
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    "victim",
    [lambda sandbox: sandbox.init_pid, supervisor_of, lambda sandbox: children(supervisor_of(sandbox))[0]],
    ids=["init", "supervisor", "bubblewrap"],
)
async def test_a_killed_sandbox_is_an_error_at_once(
    provider: LocalProvider, workspace: Path, victim: Callable[[LocalSandbox], int]
) -> None:
    sandbox, other = [await provider.start(SandboxSpec("t", workspace)) for _ in range(2)]
    found = traces(sandbox)
    running = asyncio.create_task(sandbox.exec(["sleep", "600"], timeout_s=600))
    await asyncio.sleep(0.3)
    os.kill(victim(sandbox), signal.SIGKILL)
    with pytest.raises(SandboxExecError):
        await asyncio.wait_for(running, 10)
    with pytest.raises(SandboxExecError):
        await sandbox.exec(["true"], timeout_s=20)
    await eventually(lambda: sandbox._link.closed)
    with pytest.raises(TransferError):
        await sandbox.put("/tmp/x", b"x")
    with pytest.raises(IntegrityError):
        await sandbox.set_phase(Phase.AGENT)
    await sandbox.stop()
    await nothing_left(found)
    assert await shell_text(other, "echo alive") == "alive\n"


async def test_a_stopped_supervisor_is_killed(
    provider: LocalProvider, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legorl.sandbox.link._CLOSE_S", 0.5)
    sandbox = await provider.start(SandboxSpec("t", workspace))
    found = traces(sandbox)
    os.kill(supervisor_of(sandbox), signal.SIGSTOP)
    start = time.monotonic()
    await sandbox.stop()
    assert time.monotonic() - start < 5
    await nothing_left(found)


async def test_a_new_launcher_follows_a_killed_one(provider: LocalProvider, workspace: Path) -> None:
    sandbox = await provider.start(SandboxSpec("t", workspace))
    os.kill(launcher_of(provider), signal.SIGKILL)
    with pytest.raises(SandboxExecError):
        await asyncio.wait_for(sandbox.exec(["sleep", "600"], timeout_s=600), 10)
    await sandbox.stop()
    again = await provider.start(SandboxSpec("t", workspace))
    assert await shell_text(again, "echo alive") == "alive\n"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SandboxSpec("t", Path("/no/such/workspace")), "/no/such/workspace"),
        (SandboxSpec("t", Path("/usr"), (Mount(Path("/no/such"), "/opt/x"),)), "/no/such"),
        (SandboxSpec("t", Path("/usr"), (Mount(Path("/usr"), "/proc/x/y"),)), "/proc/x"),
        (SandboxSpec("t", Path("/usr/bin/env")), "overlay|[Dd]irectory"),
        (SandboxSpec("t", Path("/usr"), start_timeout_s=0.001), "sandbox.start_timeout_s"),
    ],
)
async def test_a_failed_start_names_the_reason_and_leaves_nothing(
    provider: LocalProvider, workspace: Path, spec: SandboxSpec, message: str
) -> None:
    await (await provider.start(SandboxSpec("t", workspace))).stop()
    with pytest.raises(SandboxStartError, match=message):
        await provider.start(spec)
    await eventually(lambda: children(launcher_of(provider)) == [])


async def test_an_abandoned_start_leaves_nothing(provider: LocalProvider, workspace: Path) -> None:
    await (await provider.start(SandboxSpec("t", workspace))).stop()
    for delay in (0, 0.005, 0.02, 0.05):
        starting = asyncio.create_task(provider.start(SandboxSpec("t", workspace)))
        await asyncio.sleep(delay)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        for box in list(provider._running):
            await box.stop()  # it was faster than the cancellation
    await eventually(lambda: children(launcher_of(provider)) == [])


JOINER = """
import json, os, sys
from legorl.sandbox.join import Join, enter
enter(Join(**json.loads(sys.argv[1])))
pid = os.fork()
if pid == 0:
    os.execvpe("sh", ["sh", "-c", sys.argv[2]], json.loads(sys.argv[1])["env"])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def joined(join: Join, script: str) -> subprocess.CompletedProcess[str]:
    facts = json.dumps(
        {"init_pid": join.init_pid, "env": dict(join.env), "cwd": join.cwd, "groups": join.groups}
    )
    return subprocess.run(
        [sys.executable, "-c", JOINER, facts, script],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


async def test_a_joined_process_is_as_an_executed_one(provider: LocalProvider, workspace: Path) -> None:
    sandbox = await provider.start(SandboxSpec("t", workspace, env={"A": "b"}, limits=Limits(pids=20)))
    facts = (
        "id; pwd; env | grep -v '^_=' | sort; grep -E 'Cap|NoNew|Seccomp:' /proc/self/status; ls /; hostname;"
        " readlink /proc/self/ns/*; cat /proc/self/cgroup; ls /proc/1/fd >/dev/null 2>&1; umask"
    )
    executed = await shell_text(sandbox, facts)
    result = await asyncio.to_thread(joined, sandbox.join, facts)
    assert result.stderr == ""
    assert result.stdout == executed
    ended = asyncio.create_task(asyncio.to_thread(joined, sandbox.join, "setsid sleep 600 & sleep 600"))
    await asyncio.sleep(1)
    assert "sleep 600" in (listing := await shell_text(sandbox, "ps -e -o args")), listing
    await sandbox.set_phase(Phase.VERIFY)
    assert (await asyncio.wait_for(ended, 10)).returncode == 256 - signal.SIGKILL
    assert "sleep 600" not in await shell_text(sandbox, "ps -e -o args")
    await sandbox.stop()


async def test_what_a_killed_owner_left_is_reaped_by_the_next(
    provider: LocalProvider, workspace: Path
) -> None:
    sandbox = await provider.start(SandboxSpec("t", workspace))
    groups = [Path(group) for group in sandbox.join.groups]
    if not groups:
        pytest.skip("no control groups may be made here")
    stray = await asyncio.create_subprocess_exec("sleep", "600")
    orphaned = [group.with_name("legorl-0123456789ab-1") for group in groups]  # nobody holds its lock
    for group in orphaned:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(stray.pid))
    LocalProvider()
    assert await asyncio.wait_for(stray.wait(), 10) == -signal.SIGKILL
    assert [group for group in orphaned if group.exists()] == []
    assert await shell_text(sandbox, "echo alive") == "alive\n"


async def test_commands_of_a_new_phase_survive_the_end_of_the_old_one(
    provider: LocalProvider, workspace: Path
) -> None:
    sandbox = await provider.start(SandboxSpec("t", workspace))
    for phase in (Phase.AGENT, Phase.VERIFY, Phase.AGENT):
        old = [asyncio.create_task(sandbox.exec(["sleep", "600"], timeout_s=600)) for _ in range(3)]
        await asyncio.sleep(0.2)
        await sandbox.set_phase(phase)
        new = [asyncio.create_task(shell_text(sandbox, "sleep 0.3; echo alive")) for _ in range(3)]
        assert {result.code for result in await asyncio.wait_for(asyncio.gather(*old), 10)} == {137}
        assert await asyncio.gather(*new) == ["alive\n"] * 3


async def test_a_command_that_kills_all_costs_no_later_one(provider: LocalProvider, workspace: Path) -> None:
    sandbox = await provider.start(SandboxSpec("t", workspace))
    await asyncio.gather(*(shell_text(sandbox, "sleep 0.1") for _ in range(3)))  # three idle keepers
    for _ in range(5):
        assert (await sandbox.exec(["sh", "-c", "kill -9 -1"], timeout_s=20)).code == 137
        assert await shell_text(sandbox, "echo alive") == "alive\n"

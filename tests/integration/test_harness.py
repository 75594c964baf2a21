"""mini-swe-agent and its fork server in real sandboxes, against a scripted model server.

What all harnesses have in common is in `test_harness_live.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from legorl.config.schema import HarnessConfig
from legorl.errors import HarnessError, SandboxExecError
from legorl.harness.base import Harness, HarnessLimits, Launch, Outcome
from legorl.harness.mini_swe_agent import MiniSweAgent
from legorl.harness.program import Program
from legorl.sandbox.base import ExecResult, Phase, Sandbox, SandboxSpec
from legorl.sandbox.local import LocalProvider
from tests.integration.harness_server import Call, ScriptedServer, Turn

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

CACHE = Path(".cache/legorl")
LIMITS = HarnessLimits(turns=6, context_tokens=8192, reply_tokens=96, command_timeout_s=20)
DEADLINE_S = 150.0
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def call(command: str) -> Call:
    return Call("bash", json.dumps({"command": command}))


FINISH = call(SUBMIT)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    (root / "shop").mkdir(parents=True)
    (root / "shop" / "__init__.py").write_text("")
    (root / "shop" / "cart.py").write_text("def check_age(age, limit):\n    return age <= limit\n")
    check = "from shop.cart import check_age\nassert check_age(5, 4)\nprint('1 passed')\n"
    (root / "check.py").write_text(check)
    return root


@pytest.fixture
async def provider() -> AsyncIterator[LocalProvider]:
    provider = LocalProvider()
    yield provider
    await provider.close()


@pytest.fixture
async def mini() -> AsyncIterator[MiniSweAgent]:
    harness = MiniSweAgent(HarnessConfig(name="mini_swe_agent"))
    harness.install(CACHE)
    yield harness
    await harness.close()


@dataclass
class Stage:
    """A sandbox in the agent phase with a scripted model behind its proxy address."""

    harness: Harness
    sandbox: Sandbox
    server: ScriptedServer
    launch: Launch

    async def run(self, timeout_s: float = DEADLINE_S, *, by_exec: bool = False) -> ExecResult:
        if by_exec:
            assert isinstance(self.harness, Program)
            return await Program.run(self.harness, self.sandbox, self.launch, timeout_s)
        return await self.harness.run(self.sandbox, self.launch, timeout_s)

    async def outcome(self, **how: bool) -> Outcome:
        return await self.harness.outcome(self.sandbox, await self.run(**how))


@contextlib.asynccontextmanager
async def stage(
    provider: LocalProvider, harness: Harness, repository: Path, turns: list[Turn]
) -> AsyncIterator[Stage]:
    spec = SandboxSpec("trial-1", repository, harness.mounts(CACHE), {"FROM_SPEC": "yes"})
    sandbox = await provider.start(spec)
    try:
        server = ScriptedServer(turns)
        url = await sandbox.connect_proxy(server)
        await sandbox.set_phase(Phase.AGENT)
        launch = harness.command("The tests of `check_age` fail.\n", f"{url}/t/trial-1", "token-1", LIMITS)
        yield Stage(harness, sandbox, server, launch)
    finally:
        await sandbox.stop()


async def test_mini_gives_up_on_malformed_replies(
    mini: MiniSweAgent, provider: LocalProvider, repository: Path
) -> None:
    turns: list[Turn] = ["no call", Call("bash", '{"comm'), Call("nope", "{}")]
    async with stage(provider, mini, repository, turns) as trial:
        assert (await trial.outcome()).termination == "format_errors"
        last = trial.server.seen[-1].body["messages"]
    assert [message["content"] for message in last[2:]] == ["error: no tool call"] * 2


PROBE = """
grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp)' /proc/self/status
for n in user mnt pid net ipc uts cgroup; do readlink /proc/self/ns/$n; done
cat /proc/self/cgroup /proc/self/oom_score_adj; ulimit -a; ulimit -Ha; umask; pwd; env | sort
ls -l /proc/self/fd | tail -n +2 | sed -E 's/.* ([0-9]+ ->)/\\1/; s/[0-9]{2,}//g'
"""


def host_namespaces() -> set[str]:
    """As the probe prints them."""
    names = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
    return {str(Path("/proc/self/ns", name).readlink()) for name in names}


async def test_a_forked_agent_is_what_an_executed_one_is(
    mini: MiniSweAgent, provider: LocalProvider, repository: Path
) -> None:
    seen = []
    for by_exec in (False, True):
        async with stage(provider, mini, repository, [call(PROBE), FINISH]) as trial:
            assert (await trial.outcome(by_exec=by_exec)).termination == "submitted"
            text = trial.server.seen[-1].body["messages"][-1]["content"]
            assert not host_namespaces() & set(text.splitlines()), "it is in a namespace of the host"
            seen.append([line for line in text.splitlines() if ":[" not in line])
    assert seen[0] == seen[1]
    assert "CapEff:\t0000000000000000" in seen[0]
    assert "NoNewPrivs:\t1" in seen[0]
    assert "FROM_SPEC=yes" in seen[0]


async def test_the_deadline_ends_the_whole_tree(
    mini: MiniSweAgent, provider: LocalProvider, repository: Path
) -> None:
    linger = "setsid sleep 4321 & (setsid nohup sleep 4322 >/dev/null 2>&1 &) ; sleep 4323"
    async with stage(provider, mini, repository, [call(linger)]) as trial:
        result = await trial.run(3.0)
        left = await trial.sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"], timeout_s=10)
    assert (result.timed_out, result.code) == (True, 124)
    assert 2.9 < result.seconds < 8
    assert b"432" not in left.stdout


async def test_an_agent_that_kills_its_keeper_is_no_result(
    mini: MiniSweAgent, provider: LocalProvider, repository: Path
) -> None:
    async with stage(provider, mini, repository, [call("kill -9 -1; sleep 60")]) as trial:
        with pytest.raises((HarnessError, SandboxExecError)):
            await trial.run(30.0)
    # The server itself is out of its reach.
    async with stage(provider, mini, repository, [FINISH]) as trial:
        assert (await trial.outcome()).termination == "submitted"


async def test_a_cancelled_run_leaves_no_agent(
    mini: MiniSweAgent, provider: LocalProvider, repository: Path
) -> None:
    async with stage(provider, mini, repository, [call("sleep 4324")]) as trial:
        task = asyncio.create_task(trial.run())
        await trial.server.asked.wait()
        await asyncio.sleep(0.3)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.5)
        left = await trial.sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"], timeout_s=10)
    assert b"4324" not in left.stdout


async def test_a_dead_server_is_an_infrastructure_error_and_is_replaced(
    mini: MiniSweAgent, provider: LocalProvider, repository: Path
) -> None:
    async with stage(provider, mini, repository, [call("sleep 60")]) as trial:
        task = asyncio.create_task(trial.run())
        await trial.server.asked.wait()
        os.kill(server_pid(os.getpid()), signal.SIGKILL)
        with pytest.raises(HarnessError):
            await asyncio.wait_for(task, 15)
    async with stage(provider, mini, repository, [FINISH]) as trial:
        assert (await trial.outcome()).termination == "submitted"


def server_pid(parent: int) -> int:
    """The fork server that `parent` started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                owner = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if b"harness.inside.zygote" in command and owner == parent:
                    return int(entry.name)
    raise AssertionError("no fork server")


HOLDER = """
import asyncio, sys
from pathlib import Path
from legorl.config.schema import HarnessConfig
from legorl.harness.mini_swe_agent import MiniSweAgent

async def main():
    harness = MiniSweAgent(HarnessConfig(name="mini_swe_agent"))
    harness.mounts(Path(sys.argv[1]))
    await harness._server._ensure()
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_server_dies_with_its_parent(tmp_path: Path) -> None:
    MiniSweAgent(HarnessConfig(name="mini_swe_agent")).install(CACHE)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(CACHE.resolve())], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    server = server_pid(holder.pid)
    holder.kill()
    holder.wait(10)
    end = time.monotonic() + 5
    while Path(f"/proc/{server}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{server}").exists()


async def test_a_forked_start_is_cheap(mini: MiniSweAgent, provider: LocalProvider, repository: Path) -> None:
    """CPU of a whole two-turn trial of the agent: about 50 ms; a start of the interpreter alone costs 400."""
    trials = 8

    async def one() -> None:
        turns = [call("true"), FINISH]
        async with stage(provider, mini, repository, turns) as trial:
            assert (await trial.outcome()).termination == "submitted"

    await one()
    server = server_pid(os.getpid())
    before = cpu_s(server)
    for _ in range(trials):
        await one()
    await asyncio.sleep(0.2)
    assert (cpu_s(server) - before) / trials < 0.15


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its reaped children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")

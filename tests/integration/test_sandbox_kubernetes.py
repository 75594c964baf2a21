"""Pods of a real Kubernetes keep what every provider must keep, and leave nothing behind however they end."""

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
from typing import Any

import pytest

from legorl.config.compose import compose
from legorl.config.schema import SandboxConfig
from legorl.errors import ImageError, IntegrityError, SandboxExecError, SandboxStartError, TransferError
from legorl.sandbox import leased
from legorl.sandbox.base import Limits, Phase, Sandbox, SandboxSpec
from legorl.sandbox.kubernetes import KubernetesProvider
from legorl.sandbox.kubernetes_api import Api
from legorl.sandbox.kubernetes_sandbox import KubernetesSandbox
from legorl.sandbox.policy import load_policy
from legorl.sandbox.providers import open_provider
from legorl.sandbox.selfcheck import (
    CheckResult,
    all_checks,
    make_workspace,
    python,
    run_checks,
    shell,
    shell_text,
)
from tests.integration.kubernetes_cluster import IMAGE, LAZY_SUFFIX, Cluster, cluster
from tests.integration.test_attacks import run as attack
from tests.integration.test_trial_faults import check, model, planned, run_trials

__all__ = ["cluster", "model"]
pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
START_S = 60.0
OWNER = """
import asyncio, json, sys
from pathlib import Path
from legorl.config.compose import compose
from legorl.sandbox.base import SandboxSpec
from legorl.sandbox.providers import open_provider

async def main():
    provider = open_provider(compose(sys.argv[2:]).sandbox, "run-x")
    boxes = await asyncio.gather(*(provider.start(SandboxSpec(f"t{i}", Path(sys.argv[1]))) for i in range(2)))
    for box in boxes:
        asyncio.create_task(box.exec(["sh", "-c", "setsid sleep 600 & sleep 600"], timeout_s=600))
    await asyncio.sleep(0.5)
    print(json.dumps([box.pod for box in boxes]), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def configured(cluster: Cluster, *overrides: str) -> SandboxConfig:
    return compose([*cluster.overrides, *overrides]).sandbox


@pytest.fixture
async def provider(cluster: Cluster) -> AsyncIterator[KubernetesProvider]:
    made = open_provider(configured(cluster))
    assert isinstance(made, KubernetesProvider)
    yield made
    await made.close()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    make_workspace(tmp_path / "w")
    return tmp_path / "w"


async def pods(cluster: Cluster, selector: str = "app.kubernetes.io/managed-by=legorl") -> list[str]:
    api = Api(configured(cluster).kubernetes)
    try:
        return [pod["metadata"]["name"] for pod in await api.list_pods(selector)]
    finally:
        await api.close()


async def phases(cluster: Cluster, names: list[str]) -> set[str]:
    api = Api(configured(cluster).kubernetes)
    try:
        return {(await api.read_pod(name))["status"]["phase"] for name in names}
    finally:
        await api.close()


def spec(workspace: Path, name: str = "t", **options: Any) -> SandboxSpec:
    return SandboxSpec(name, workspace, start_timeout_s=START_S, **options)


@pytest.mark.timeout(400)
async def test_self_check(cluster: Cluster, provider: KubernetesProvider, tmp_path: Path) -> None:
    """Several checks at a time: most of each is waiting for its pod."""

    async def some(names: list[str]) -> list[CheckResult]:
        directory = tmp_path / names[0]
        directory.mkdir()
        return [result async for result in run_checks(provider, directory, names)]

    names = list(all_checks())
    parts = await asyncio.gather(*(some(names[start::4]) for start in range(4)))
    assert {r.name: r.failure for part in parts for r in part if r.failure} == {}
    assert sum(map(len, parts)) == len(names)
    assert await pods(cluster) == []


async def test_a_killed_owner_leaves_no_pod_and_no_process(cluster: Cluster, workspace: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(workspace), *cluster.overrides]
    owner = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    try:
        names = json.loads(await asyncio.wait_for(owner.stdout.readline(), 90))
        assert sorted(await pods(cluster)) == sorted(names) and len(names) == 2
        assert commands_like("sleep\x00600") != []
        owner.kill()
        await eventually_async(lambda: pods(cluster), [], 30)
        if cluster.log is not None:
            await eventually(lambda: commands_like("sleep\x00600") == [])
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()


def commands_like(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_text(errors="replace")
            except OSError:
                continue
            if text in command:
                found.append(f"{entry.name} {command!r}")
    return found


async def eventually(holds: Callable[[], bool], within_s: float = 20) -> None:
    end = time.monotonic() + within_s
    while not holds() and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    assert holds()


async def eventually_async(ask: Callable[[], Any], expected: object, within_s: float) -> None:
    end = time.monotonic() + within_s
    while (found := await ask()) != expected and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.3)
    assert found == expected


async def test_a_pod_ends_by_itself_and_the_runs_next_owner_removes_it(
    cluster: Cluster, workspace: Path
) -> None:
    """The owner is stopped, as on a machine that has gone: nobody hangs up, nobody is left to delete."""
    settings = ("sandbox.kubernetes.orphan_s=15",)
    command = [sys.executable, "-c", OWNER, str(workspace), *cluster.overrides, *settings]
    owner = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    other, same = (open_provider(configured(cluster), run) for run in ("another", "run-x"))
    assert owner.stdout is not None
    try:
        names = json.loads(await asyncio.wait_for(owner.stdout.readline(), 90))
        os.kill(owner.pid, signal.SIGSTOP)
        await eventually_async(lambda: phases(cluster, names), {"Failed"}, 45)
        for provider, left in ((other, names), (same, [])):
            sandbox = await provider.start(spec(workspace))
            await sandbox.stop()
            await eventually_async(lambda: pods(cluster, "legorl.dev/run=run-x"), left, 1)
    finally:
        await other.close()
        await same.close()
        owner.kill()
        await owner.wait()


REACH = """
import socket
def reach(what, family, kind, address):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(2); s.connect(address); s.sendall(b'x' * 40); s.recv(1)
    except OSError:
        return
    print(what)
"""


@pytest.mark.parametrize("off", [False, True])
async def test_the_network_is_closed_and_a_switch_opens_it(
    cluster: Cluster, workspace: Path, off: bool
) -> None:
    """What the guard's own container tries shows the filter; what a command tries, the whole rule."""
    switches = ("sandbox.policy_off=[network_closed]",) if off else ()
    provider = open_provider(configured(cluster, *switches))
    server = await asyncio.start_server(greet, cluster.proxy_host, 0)
    udp = await asyncio.get_running_loop().create_datagram_endpoint(Echo, (cluster.proxy_host, 0))
    tcp_port = server.sockets[0].getsockname()[1]
    udp_port = udp[0].get_extra_info("sockname")[1]
    program = (
        REACH
        + f"""
reach('tcp', socket.AF_INET, socket.SOCK_STREAM, ({cluster.proxy_host!r}, {tcp_port}))
reach('udp', socket.AF_INET, socket.SOCK_DGRAM, ({cluster.proxy_host!r}, {udp_port}))
"""
    )
    expected = b"tcp\nudp\n" if off else b""
    try:
        sandbox = await provider.start(spec(workspace))
        assert isinstance(sandbox, KubernetesSandbox)
        await sandbox.set_phase(Phase.AGENT)
        assert (await python(sandbox, program)).stdout == expected
        assert await in_guard(cluster, sandbox.pod, program) == expected
        await sandbox.stop()
    finally:
        server.close()
        udp[0].close()
        await provider.close()


async def in_guard(cluster: Cluster, pod: str, program: str) -> bytes:
    """Standard output of a program in the privileged container."""
    api = Api(configured(cluster).kubernetes)
    try:
        websocket = await api.connect(pod, "guard", ["python3", "-c", program])
        output = b""
        async with asyncio.timeout(30):
            async for message in websocket:
                output += message.data[1:] if message.data[0] == 1 else b""
        return output
    finally:
        await api.close()


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    await writer.drain()
    writer.close()


class Echo(asyncio.DatagramProtocol):
    """Sends back what comes."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        self.transport.sendto(data, address)


async def test_rules_that_are_off_are_off(cluster: Cluster, workspace: Path) -> None:
    off = "no_privileges,limits,processes_ended,host_invisible,runtime_read_only,no_credentials"
    provider = open_provider(configured(cluster, f"sandbox.policy_off=[{off}]"))
    try:
        sandbox = await provider.start(spec(workspace, limits=Limits(memory_mb=64, disk_mb=16, pids=20)))
        assert await shell_text(sandbox, "id -u") == "0\n"
        await shell_text(sandbox, "mount -t tmpfs none /tmp && head -c 64M /dev/zero > /tmp/big")
        assert (await python(sandbox, "x = bytearray(300 << 20); print('got it')")).stdout == b"got it\n"
        assert await shell_text(sandbox, "ls /host/etc/hostname") == "/host/etc/hostname\n"
        await shell_text(sandbox, "sleep 71 >/dev/null 2>&1 &")
        await sandbox.set_phase(Phase.AGENT)
        assert "sleep" in await shell_text(sandbox, "ps ax")
        assert dict((await sandbox.snapshot()).changed) == {}
        await sandbox.stop()
    finally:
        await provider.close()


@pytest.mark.timeout(600)
def test_no_attack_works_unless_its_rule_is_off(cluster: Cluster) -> None:
    """The suite finds out by itself whether the attacks on a rule work without it."""
    assert attack(*cluster.overrides)[0] == 0
    assert attack("--ablate", "--rule", "no_credentials", *cluster.overrides)[0] == 0


async def test_faults_are_typed_errors_with_the_reason(
    cluster: Cluster, provider: KubernetesProvider, workspace: Path
) -> None:
    with pytest.raises(ImageError, match="no-such-image:1"):
        await provider.start(spec(workspace, image="localhost/no-such-image:1"))
    with pytest.raises(SandboxStartError, match="not started after"):
        await provider.start(SandboxSpec("t", workspace, start_timeout_s=0.1))
    sandbox = await provider.start(spec(workspace))
    running = asyncio.create_task(shell(sandbox, "sleep 72", timeout_s=60))
    await asyncio.sleep(0.5)
    api = Api(configured(cluster).kubernetes)
    await api.delete_pod(sandbox.pod)
    await api.close()
    with pytest.raises(SandboxExecError, match=sandbox.pod):
        await asyncio.wait_for(running, 30)
    await gone(sandbox)
    await sandbox.stop()
    # A dropped connection: the guard hangs up, and nobody takes that for the command's end.
    sandbox = await provider.start(spec(workspace))
    running = asyncio.create_task(shell(sandbox, "sleep 73", timeout_s=60))
    await asyncio.sleep(0.3)
    await sandbox._link._socket.close()
    with pytest.raises(SandboxExecError, match="connection to the pod"):
        await asyncio.wait_for(running, 10)
    await gone(sandbox)
    await sandbox.stop()
    await eventually_async(lambda: pods(cluster), [], 10)


async def gone(sandbox: Sandbox) -> None:
    """Every operation says so."""
    with pytest.raises(SandboxExecError):
        await shell(sandbox, "true")
    with pytest.raises(TransferError):
        await sandbox.put("/tmp/x", b"x")
    with pytest.raises(TransferError):
        await sandbox.snapshot()
    with pytest.raises(IntegrityError):
        await sandbox.set_phase(Phase.AGENT)


async def test_an_api_server_that_is_down_is_infrastructure(workspace: Path, tmp_path: Path) -> None:
    """Answers 503 at first, then nothing at all."""
    asked = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        body = json.dumps({"message": "etcd has no leader"}).encode()
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    file = tmp_path / "kubeconfig"
    place = {"server": f"http://127.0.0.1:{port}"}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    clusters = {"clusters": [{"name": "c", "cluster": place}], "users": [{"name": "u", "user": {}}]}
    file.write_text(json.dumps({**clusters, "contexts": [context], "current-context": "c"}))
    config = compose(
        ["sandbox=kubernetes", f"sandbox.kubernetes.kubeconfig={file}", "sandbox.image=i"]
    ).sandbox
    config.kubernetes.guard_image = "g"
    provider = KubernetesProvider(config.kubernetes, load_policy(), image="i")
    with pytest.raises(SandboxStartError, match="says 503: etcd has no leader"):
        await provider.start(spec(workspace))
    assert len(asked) == 4
    server.close()
    with pytest.raises(SandboxStartError, match="cannot list pods: Cannot connect"):
        await provider.start(spec(workspace))
    await provider.close()


async def test_a_lazy_image_is_kept_by_the_nodes_snapshotter(cluster: Cluster, workspace: Path) -> None:
    """Names are rewritten, and the nodes told; the root directory then is nydus-snapshotter's."""
    if not cluster.nydus:
        pytest.skip("the cluster has no nydus-snapshotter")
    lazy = (
        "sandbox.kubernetes.lazy.mirrors=['docker.io=localhost']",
        f"sandbox.kubernetes.lazy.suffix={LAZY_SUFFIX}",
        "sandbox.kubernetes.lazy.annotations=['containerd.io/snapshotter=nydus']",
    )
    config = configured(cluster, *lazy)
    provider, api = open_provider(config), Api(config.kubernetes)
    try:
        image = IMAGE.replace("localhost/", "docker.io/")
        sandbox = await provider.start(spec(workspace, image=image))
        assert isinstance(sandbox, KubernetesSandbox)
        pod = await api.read_pod(sandbox.pod)
        images = {container["name"]: container["image"] for container in pod["spec"]["containers"]}
        assert images == {"agent": IMAGE + LAZY_SUFFIX, "guard": IMAGE}
        assert pod["metadata"]["annotations"]["containerd.io/snapshotter"] == "nydus"
        root = await shell_text(sandbox, "grep ' / / ' /proc/self/mountinfo")
        assert "/nydus/snapshots/" in root
        await sandbox.stop()
    finally:
        await api.close()
        await provider.close()


@pytest.mark.timeout(300)
async def test_faults_in_whole_trials(
    cluster: Cluster, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, but for the start that hangs, for starts are given more time here; no pod is left."""
    if cluster.log is None:
        pytest.skip("a sandbox is killed from outside, so its node has to be this machine")
    monkeypatch.setattr(leased, "GRACE_S", 2.0)
    plan = planned(1, 3)
    del plan["ready-hung-0"]
    results = await run_trials(plan, tmp_path / "tasks", model, tmp_path / "run", *cluster.overrides)
    check(plan, results, tmp_path / "run")
    await eventually_async(lambda: pods(cluster), [], 10)

"""The tests' own Kubernetes leaves nothing of itself, also when the test run is killed while it starts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.kubernetes_cluster import ROOT, why_not

REASON = why_not()
pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(REASON), reason=REASON)]


def traces(name: str) -> dict[str, list[str]]:
    """What shows of a cluster whose directory has this name."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_text(errors="replace")
            except OSError:
                continue
            if name in command:
                processes.append(command.replace("\0", " ")[:80])
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if name in line]
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{name}")]
    return {"processes": processes, "mounts": mounts, "groups": groups}


def node_of(pid: int) -> Path | None:
    """Directory of the cluster that a process has started; None before it has."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if "tests.integration.kubernetes_node" in words:
            return Path(json.loads(words[-2])["root"])
    return None


def cable_of(root: Path) -> Path:
    """The host's network interface of a cluster."""
    server = json.loads((root / "kubeconfig").read_text())["clusters"][0]["cluster"]["server"]
    return Path("/sys/class/net", f"legok8s{server.split('.')[2]}")


def test_a_killed_test_run_leaves_nothing() -> None:
    program = "from tests.integration.kubernetes_cluster import own_cluster\nwith own_cluster(): pass"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)
    try:
        end = time.monotonic() + 90
        while True:
            assert time.monotonic() < end and process.poll() is None
            root = node_of(process.pid)
            if root is not None and len(traces(root.name)["processes"]) >= 5:
                break
            time.sleep(0.1)
        cable = cable_of(root)
        assert cable.exists() and traces(root.name)["groups"] != []
    finally:
        process.kill()
        process.wait()
    end = time.monotonic() + 20
    while (root.exists() or any(traces(root.name).values()) or cable.exists()) and time.monotonic() < end:
        time.sleep(0.1)
    assert traces(root.name) == {"processes": [], "mounts": [], "groups": []}
    assert not root.exists() and not cable.exists()

"""A real Kubernetes for tests: the one of `LEGORL_TEST_KUBECONFIG`, or one node of our own for the session.

Our own is made of server binaries in a tarball (`LEGORL_TEST_KUBERNETES_TARBALL`) and of Debian's etcd,
containerd and runc; `kubernetes_node.py` runs it. Without either, tests that need it are skipped and say
why.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.kubernetes_node import PREFIX
from tests.integration.rootfs import rootfs_tar

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "kubernetes"
TARBALL = ROOT.parent / "shared" / "lab" / "k8s" / "kubernetes-1.20.2-linux-amd64.tar.xz"
IMAGE = "localhost/legorl-test:1"
LAZY_SUFFIX = "-nydus"
BOX = Path("/tmp/legorl-kubernetes")
_TOOLS = ("etcd", "containerd", "ctr", "runc", "ip", "openssl", "nft")
_READY_S = 150.0
_FORMAT = 2
_END_S = 30.0


@dataclass(frozen=True)
class Cluster:
    """A cluster to test against."""

    kubeconfig: Path
    image: str
    """Has the usual programs, git, python and nft."""
    proxy_host: str
    """Address of this machine that pods reach."""
    log: Path | None = None
    """Where the servers of our own cluster write; None for another's."""
    nydus: bool = False
    """Whether nydus-snapshotter keeps the images, each also under a name with `LAZY_SUFFIX`."""

    @property
    def overrides(self) -> list[str]:
        """Of the configuration."""
        return [
            "sandbox=kubernetes",
            f"sandbox.image={self.image}",
            f"sandbox.kubernetes.guard_image={self.image}",
            f"sandbox.kubernetes.kubeconfig={self.kubeconfig}",
            f"sandbox.kubernetes.proxy_host={self.proxy_host}",
            "sandbox.kubernetes.cpu_request=0.05",  # a node of two cores takes twenty pods
        ]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The session's cluster."""
    given = os.environ.get("LEGORL_TEST_KUBECONFIG")
    if given:
        yield Cluster(
            Path(given),
            os.environ.get("LEGORL_TEST_KUBERNETES_IMAGE", IMAGE),
            os.environ.get("LEGORL_TEST_KUBERNETES_PROXY_HOST", "127.0.0.1"),
        )
        return
    if reason := why_not():
        pytest.skip(reason)
    with own_cluster() as made:
        yield made


def tarball() -> Path:
    """The server binaries."""
    return Path(os.environ.get("LEGORL_TEST_KUBERNETES_TARBALL", TARBALL))


def why_not() -> str:
    """Why this machine cannot run a cluster of its own; empty when it can."""
    hint = "; or name a cluster's kubeconfig in LEGORL_TEST_KUBECONFIG"
    if os.geteuid() != 0:
        return f"a Kubernetes node needs root{hint}"
    if not tarball().exists():
        return f"no Kubernetes server binaries at {tarball()} (LEGORL_TEST_KUBERNETES_TARBALL){hint}"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if not Path("/usr/lib/cni/bridge").exists():
        missing.append("CNI plugins")
    return f"{', '.join(missing)} missing: run scripts/test_servers.sh{hint}" if missing else ""


@contextlib.contextmanager
def own_cluster() -> Iterator[Cluster]:
    """Start one, and remove all of it in the end. Nydus keeps its images where that program can be had."""
    from tests.integration.nydus import nydus_snapshotter

    nydus = nydus_snapshotter()
    binaries = _binaries()
    archives = [
        _image("localhost/pause:1", _pause_layer(binaries), ["/pause"]),
        _image(IMAGE, rootfs_tar(("nftables",)), ["/bin/sh"]),
    ]
    BOX.mkdir(exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=BOX))
    root.rmdir()  # the node makes it, with its lock
    options: dict[str, Any] = {
        "root": str(root),
        "binaries": str(binaries),
        "images": [str(path) for path in archives],
        "nydus": str(nydus or ""),
    }
    command = [sys.executable, "-m", "tests.integration.kubernetes_node", json.dumps(options)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        answer = _answer(process)
        assert "error" not in answer, json.dumps(answer, indent=1).replace("\\n", "\n")
        yield Cluster(
            Path(answer["kubeconfig"]), IMAGE, answer["host"], Path(answer["log"]), nydus is not None
        )
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(_END_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _answer(process: subprocess.Popen[bytes]) -> dict[str, str]:
    """The node's one line, waited for with a deadline."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    text, end = b"", time.monotonic() + _READY_S
    while not text.endswith(b"\n"):
        assert process.poll() is None, f"the node ended with {process.returncode}"
        assert time.monotonic() < end, "the node is not ready"
        text += process.stdout.read() or b""
        time.sleep(0.05)
    answer: dict[str, str] = json.loads(text)
    return answer


@contextlib.contextmanager
def made_once(target: Path) -> Iterator[Path | None]:
    """A place to make `target` in, None when it is there; whole or not at all, by one process at a time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
            partial = Path(scratch, target.name)
            yield partial
            partial.rename(target)


def _binaries() -> Path:
    source = tarball()
    status = source.stat()
    target = CACHE / hashlib.sha256(f"{source.name} {status.st_size}".encode()).hexdigest()[:16]
    with made_once(target) as partial:
        if partial is not None:
            partial.mkdir()
            subprocess.run(["tar", "-xf", source, "-C", partial], check=True, timeout=120)
    return target


def _pause_layer(binaries: Path) -> Path:
    target = CACHE / f"{binaries.name}-pause.tar"
    with made_once(target) as partial:
        if partial is not None:
            with tarfile.open(partial, "w") as tar:
                tar.add(binaries / "pause", "pause", filter=_plain)
    return target


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode = 0o755
    return info


def _image(name: str, layer: Path, command: list[str]) -> Path:
    """An archive, as `docker save` writes it, of an image of one layer."""
    status = layer.stat()
    key = hashlib.sha256(repr((_FORMAT, name, str(layer), status.st_size, status.st_mtime_ns)).encode())
    target = CACHE / f"image-{key.hexdigest()[:16]}.tar"
    with made_once(target) as partial:
        if partial is None:
            return target
        with layer.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "Cmd": command,
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
        manifest = [
            {"Config": "config.json", "RepoTags": [name, name + LAZY_SUFFIX], "Layers": ["layer.tar"]}
        ]
        with tarfile.open(partial, "w") as tar:
            for file, content in (("config.json", config), ("manifest.json", manifest)):
                data = json.dumps(content).encode()
                info = tarfile.TarInfo(file)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            tar.add(layer, "layer.tar", filter=_plain)
    return target


if __name__ == "__main__":  # for a look around: python -m tests.integration.kubernetes_cluster
    if reason := why_not():
        raise SystemExit(reason)
    begun = time.monotonic()
    with own_cluster() as own:
        print(f"ready after {time.monotonic() - begun:.1f} s\nlegorl sandbox check {' '.join(own.overrides)}")
        print("ends with its standard input", flush=True)
        sys.stdin.read()

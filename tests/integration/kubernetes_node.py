"""A real one-node Kubernetes in namespaces of its own, as a program; `kubernetes_cluster.py` starts it.

    owner (the host's namespaces) ─ init (own mount, process and network namespace) ─ servers, pods

Invariant: every process, mount and network interface lives in init's namespaces, so the kernel removes them
when init dies, and init dies with the owner, which ends with its standard input. What the kernel keeps,
control groups and the directory, the owner removes; what a killed owner left of these, the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from legorl.sandbox import linux

TOKEN = "legorl-admin"
NODE = "legorl-node"
PREFIX = "legorl-k8s-"
_MS_SHARED = 1 << 20
_SLOTS = range(64)
_READY_S = 90.0
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Setting:
    """What init needs to know."""

    root: Path
    binaries: Path
    images: tuple[Path, ...]
    """Archives to import."""
    slot: int
    """Third byte of the addresses, so that several clusters run beside each other."""
    nydus: str = ""
    """Path of nydus-snapshotter, which then keeps all images; empty for overlayfs."""

    @property
    def host(self) -> str:
        """Address of the host as pods see it."""
        return f"10.249.{self.slot}.1"

    @property
    def node(self) -> str:
        """Address of the node."""
        return f"10.249.{self.slot}.2"

    @property
    def pods(self) -> str:
        """Pod network without its last byte."""
        return f"10.250.{self.slot}"

    @property
    def interface(self) -> str:
        """The host's end of the cable to the node."""
        return f"legok8s{self.slot}"


def main() -> None:
    """Owner: reads its setting from the command line, writes one JSON line when the cluster is ready."""
    options = json.loads(sys.argv[1])
    linux.set_parent_death_signal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    root = Path(options["root"])
    sweep(root.parent)
    root.mkdir(parents=True)
    lock = (root / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    groups = _make_groups(root.name)
    try:
        _run_cluster(root, options)
    finally:
        for group in groups:
            _remove_group(group)
        shutil.rmtree(root, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove what killed owners left: a directory that nobody holds the lock of, and its control groups."""
    for root in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (root / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for group in _CGROUPS.glob(f"*/{root.name}"):
                _remove_group(group)
            shutil.rmtree(root, ignore_errors=True)


def _make_groups(name: str) -> list[Path]:
    made = []
    for controller in sorted(_CGROUPS.iterdir()):
        if controller.is_symlink() or not (controller / "cgroup.procs").exists():
            continue
        group = controller / name
        group.mkdir()
        made.append(group)
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (controller / file).exists():
                (group / file).write_text((controller / file).read_text())
    return made


def _remove_group(group: Path) -> None:
    for directory, _, _ in os.walk(group, topdown=False):
        end = time.monotonic() + 5
        while True:
            try:
                Path(directory).rmdir()
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > end:
                    break
                time.sleep(0.02)
            else:
                break


def _run_cluster(root: Path, options: dict[str, object]) -> None:
    started, start = os.pipe()
    ready, is_ready = os.pipe()
    inside, is_inside = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            linux.set_parent_death_signal(signal.SIGKILL)
            linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET)
            pid = os.fork()  # the first process of the new process namespace
            if pid == 0:
                linux.set_parent_death_signal(signal.SIGKILL)
                slot = int(os.read(started, 16))
                setting = Setting(
                    root,
                    Path(str(options["binaries"])),
                    tuple(map(Path, options["images"])),  # type: ignore[call-overload]
                    slot,
                    str(options["nydus"]),
                )
                _init(setting, is_ready)
            os.write(is_inside, str(pid).encode())
            os.waitpid(pid, 0)
        finally:
            os._exit(1)
    try:
        pid = int(os.read(inside, 16))
        slot = _plug_in(pid)
        os.write(start, str(slot).encode())
        readable, _, _ = select.select([ready, sys.stdin], [], [], _READY_S + 30)
        if ready in readable:
            print(os.read(ready, 65536).decode(), flush=True)
            with contextlib.suppress(InterruptedError):
                select.select([sys.stdin], [], [])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(middle, signal.SIGKILL)
        os.waitpid(middle, 0)


def _ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True, timeout=10, check=False).returncode == 0


def _plug_in(pid: int) -> int:
    """Lay a cable from the host to init's network namespace; the first slot that is free."""
    for slot in _SLOTS:
        setting = Setting(Path(), Path(), (), slot)
        if _ip(
            *("link", "add", setting.interface, "type", "veth"), *("peer", "name", "up0", "netns", str(pid))
        ):
            assert _ip("address", "add", f"{setting.host}/30", "dev", setting.interface)
            assert _ip("link", "set", setting.interface, "up")
            assert _ip("route", "add", f"{setting.pods}.0/24", "via", setting.node)
            return slot
    raise SystemExit("no network slot is free")


def _init(setting: Setting, is_ready: int) -> NoReturn:
    """Body of the namespaces' first process."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        answer = _Node(setting).start()
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}", "logs": _ends_of_logs(setting.root)}
    os.write(is_ready, json.dumps(answer).encode())
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(1)


def _ends_of_logs(root: Path) -> dict[str, str]:
    return {log.stem: log.read_text(errors="replace")[-1500:] for log in sorted((root / "log").glob("*.log"))}


class _Node:
    """Starts the servers, in init."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.root = setting, setting.root
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> dict[str, str]:
        """Returns when a pod can be made."""
        for name in ("pki", "log", "cni/conf", "kubelet", "containerd", "etcd"):
            (self.root / name).mkdir(parents=True, mode=0o700)
        self._namespaces()
        self._files()
        self._servers()
        self._wait("apiserver", lambda: self._get("/readyz") == b"ok")
        self._run("kube-scheduler", "--leader-elect=false", "--port=0", f"--kubeconfig={self._kubeconfig}")
        self._wait("containerd", (self.root / "containerd" / "sock").exists)
        kind = ["--snapshotter", "nydus"] if self.setting.nydus else []
        for image in self.setting.images:
            self._ctr("images", "import", *kind, str(image))
        self._kubelet()
        self._wait("node", self._node_is_ready)
        return {"kubeconfig": str(self._kubeconfig), "host": self.setting.host, "log": str(self.root / "log")}

    def _namespaces(self) -> None:
        # Shared within, as kubelet wants it; nothing reaches the host.
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("none", "/", "", linux.MS_REC | _MS_SHARED)
        linux.mount("proc", "/proc", "proc", 0)
        for name in ("netns", "containerd", "kubernetes"):
            directory = Path("/run", name)
            if directory.exists() or name == "netns":
                directory.mkdir(exist_ok=True)
                linux.mount("tmpfs", str(directory), "tmpfs", 0)
        node, pods = self.setting.node, self.setting.pods
        for arguments in (
            "link set lo up",
            f"address add {node}/30 dev up0",
            "link set up0 up",
            f"route add default via {self.setting.host}",  # kubelet wants one; it leads no further
            # An address of its own: it would change whenever a pod comes or goes, unknown to the other pods.
            "link add lego0 address 02:00:00:00:00:01 type bridge",
            f"address add {pods}.1/24 dev lego0",
            "link set lego0 up",
        ):
            assert _ip(*arguments.split()), arguments
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    @property
    def _kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def _url(self) -> str:
        return f"https://{self.setting.node}:16443"

    def _files(self) -> None:
        root, pods = self.root, self.setting.pods
        for command in ("genrsa -out sa.key 2048", "rsa -in sa.key -pubout -out sa.pub"):
            subprocess.run(
                ["openssl", *command.split()], cwd=root / "pki", capture_output=True, check=True, timeout=30
            )
        (root / "pki" / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        self._write_json(
            "kubeconfig",
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [
                    {"name": "c", "cluster": {"server": self._url, "insecure-skip-tls-verify": True}}
                ],
                "users": [{"name": "admin", "user": {"token": TOKEN}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "admin"}}],
                "current-context": "c",
            },
        )
        self._write_json(
            "kubelet.yaml",
            {
                "apiVersion": "kubelet.config.k8s.io/v1beta1",
                "kind": "KubeletConfiguration",
                "address": self.setting.node,
                "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
                "authorization": {"mode": "AlwaysAllow"},
                "cgroupDriver": "cgroupfs",
                "cgroupRoot": f"/{root.name}",
                "failSwapOn": False,
                "makeIPTablesUtilChains": False,
                "enforceNodeAllocatable": [],
                "resolvConf": "",
                "imageGCHighThresholdPercent": 100,
                "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
                "nodeStatusUpdateFrequency": "1s",
                "syncFrequency": "2s",
                "maxPods": 200,
                "registryPullQPS": 0,
            },
        )
        address = {"subnet": f"{pods}.0/24", "rangeStart": f"{pods}.10", "gateway": f"{pods}.1"}
        ipam = {"type": "host-local", "ranges": [[address]], "routes": [{"dst": "0.0.0.0/0"}]}
        bridge = {"type": "bridge", "bridge": "lego0", "isGateway": True, "hairpinMode": True}
        self._write_json(
            "cni/conf/10-lego.conflist",
            {
                "cniVersion": "0.4.0",
                "name": "lego",
                "plugins": [
                    {**bridge, "ipam": {**ipam, "dataDir": str(root / "cni" / "ipam")}},
                    {"type": "loopback"},
                ],
            },
        )
        # Without nydusd, which no package has, images are unpacked by it as by any other snapshotter.
        (root / "nydus.toml").write_text(f"""
version = 1
root = "{root}/nydus"
address = "{root}/nydus.sock"
daemon_mode = "none"
[system]
enable = false
[daemon]
fs_driver = "nodev"
[snapshot]
enable_nydus_overlayfs = false
""")
        plugin = f"""
[proxy_plugins.nydus]
  type = "snapshot"
  address = "{root}/nydus.sock"
"""
        (root / "containerd.toml").write_text(f"""
version = 2
root = "{root}/containerd/root"
state = "{root}/containerd/state"
[grpc]
  address = "{root}/containerd/sock"
{plugin if self.setting.nydus else ""}
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{root}/cni/conf"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{"nydus" if self.setting.nydus else "overlayfs"}"
    disable_snapshot_annotations = false
""")

    def _write_json(self, name: str, content: object) -> None:
        (self.root / name).write_text(json.dumps(content))

    def _servers(self) -> None:
        etcd, pki = "http://127.0.0.1:12379", self.root / "pki"
        self._run(
            "etcd",
            *("--data-dir", str(self.root / "etcd"), "--unsafe-no-fsync"),
            *("--listen-client-urls", etcd, "--advertise-client-urls", etcd),
            *("--listen-peer-urls", "http://127.0.0.1:12380"),
            *("--initial-advertise-peer-urls", "http://127.0.0.1:12380"),
            *("--initial-cluster", "default=http://127.0.0.1:12380"),
        )
        if self.setting.nydus:
            self._run(self.setting.nydus, "--config", str(self.root / "nydus.toml"), "--log-to-stdout")
            self._wait("nydus", (self.root / "nydus.sock").exists)
        self._run("containerd", "-c", str(self.root / "containerd.toml"))
        self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            f"--bind-address={self.setting.node}",
            f"--advertise-address={self.setting.node}",
            "--secure-port=16443",
            f"--cert-dir={pki}",
            f"--token-auth-file={pki}/tokens.csv",
            "--authorization-mode=RBAC",
            f"--service-cluster-ip-range=10.251.{self.setting.slot}.0/24",
            "--service-account-issuer=https://legorl",
            f"--service-account-signing-key-file={pki}/sa.key",
            f"--service-account-key-file={pki}/sa.pub",
            "--allow-privileged=true",
            # Without a controller manager there are no default accounts and taints are never removed.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            "--kubelet-preferred-address-types=InternalIP",
        )

    def _kubelet(self) -> None:
        self._run(
            "kubelet",
            f"--config={self.root}/kubelet.yaml",
            f"--kubeconfig={self._kubeconfig}",
            f"--hostname-override={NODE}",
            f"--node-ip={self.setting.node}",
            f"--root-dir={self.root}/kubelet",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{self.root}/containerd/sock",
            f"--cert-dir={self.root}/kubelet/pki",
            "--v=2",
        )

    def _run(self, program: str, *arguments: str) -> None:
        own = self.setting.binaries / program
        log = (self.root / "log" / f"{Path(program).name}.log").open("wb")
        self.running[program] = subprocess.Popen(
            [str(own) if own.exists() else program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _ctr(self, *arguments: str) -> None:
        command = ["ctr", "-a", str(self.root / "containerd" / "sock"), "-n", "k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"

    def _get(self, path: str) -> bytes:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        request = urllib.request.Request(self._url + path, headers={"Authorization": f"Bearer {TOKEN}"})
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5, context=context) as r:
            data: bytes = r.read()
            return data
        return b""

    def _node_is_ready(self) -> bool:
        answer = self._get(f"/api/v1/nodes/{NODE}")
        conditions = json.loads(answer)["status"]["conditions"] if answer else []
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def _wait(self, what: str, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + _READY_S
        while not holds():
            for name, process in self.running.items():
                assert process.poll() is None, f"{name} ended with {process.returncode}"
            assert time.monotonic() < end, f"{what} was not ready after {_READY_S} s"
            time.sleep(0.05)


if __name__ == "__main__":
    main()

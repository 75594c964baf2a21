"""A real Docker engine for tests: a dockerd of their own, or the one that LEGORL_TEST_DOCKER_HOST names.

    from tests.integration.docker_engine import docker_engine   # a fixture of the session

Invariant: the daemon, its containers and its mounts live in process, mount and network namespaces that end
with the process that started it, however that ends; its data lies in a temporary directory, its control
groups below one of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.rootfs import rootfs_tar

IMAGE = "legorl-test-base:1"
_START_S = 40
_STOP_S = 20
_CLI_S = 120


@dataclass(frozen=True)
class Engine:
    """A running engine that has the image `IMAGE`."""

    host: str
    """Its URL."""

    def docker(self, *arguments: str, stdin: str | None = None) -> str:
        """Standard output of the Docker client."""
        command = ["docker", "-H", self.host, *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=_CLI_S, check=False
        )
        assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr.strip()[-1000:]}"
        return done.stdout

    def containers(self) -> set[str]:
        """Ids of all containers, running or not."""
        return set(self.docker("ps", "-aq", "--no-trunc").split())


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Engine]:
    """The engine of this test session."""
    with running_engine() as engine:
        yield engine


@contextmanager
def running_engine() -> Iterator[Engine]:
    """Start an engine, or take the one of the environment."""
    if host := os.environ.get("LEGORL_TEST_DOCKER_HOST"):
        engine = Engine(host)
        _import(engine)
        yield engine
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("needs root and Docker (scripts/test_servers.sh), or LEGORL_TEST_DOCKER_HOST")
    with _daemon() as engine:
        _import(engine)
        yield engine


def _import(engine: Engine) -> None:
    if not engine.docker("images", "-q", IMAGE).strip():
        path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        engine.docker("import", "--change", path, str(rootfs_tar()), IMAGE)


@contextmanager
def running_podman() -> Iterator[Engine]:
    """Podman behind the same interface, or the one that LEGORL_TEST_PODMAN_HOST names."""
    if host := os.environ.get("LEGORL_TEST_PODMAN_HOST"):
        engine = Engine(host)
        _import(engine)
        yield engine
        return
    if os.geteuid() != 0 or shutil.which("podman") is None or shutil.which("docker") is None:
        pytest.skip("needs root and Podman (scripts/test_servers.sh), or LEGORL_TEST_PODMAN_HOST")
    with _directory("legorl-podman-") as directory:
        (directory / "runtime").write_text(_RUNTIME)
        (directory / "runtime").chmod(0o755)
        (directory / "containers.conf").write_text(
            f'[engine]\nruntime = "own"\n[engine.runtimes]\nown = ["{directory}/runtime"]\n'
        )
        where = ("--root", str(directory / "root"), "--runroot", str(directory / "run"))
        service = ("system", "service", "--time", "0", f"unix://{directory}/docker.sock")
        command = ("podman", *where, "--cgroup-manager", "cgroupfs", *service)
        try:
            with _served(directory, command) as engine:
                _import(engine)
                yield engine
        finally:
            _remove_groups("libpod_parent")  # Podman's own; those that are in use stay


_RUNTIME = """#!/usr/bin/python3
# runc, without the limits that a machine whose root lacks CAP_SYS_RESOURCE cannot set.
import json, os, sys
if "create" in sys.argv:
    path = os.path.join(sys.argv[sys.argv.index("--bundle") + 1], "config.json")
    config = json.load(open(path))
    for name in ("rlimits", "oomScoreAdj"):
        config["process"].pop(name, None)
    json.dump(config, open(path, "w"))
os.execvp("runc", ["runc", *sys.argv[1:]])
"""


@contextmanager
def _daemon() -> Iterator[Engine]:
    with _directory("legorl-dockerd-") as directory:
        command = (
            *("dockerd", "--host", f"unix://{directory}/docker.sock", "--data-root", str(directory / "root")),
            *("--exec-root", str(directory / "exec"), "--pidfile", str(directory / "pid")),
            *("--bip", "10.252.0.1/24", "--cgroup-parent", directory.name),
        )
        with _served(directory, command) as engine:
            yield engine


@contextmanager
def _directory(prefix: str) -> Iterator[Path]:
    """With a lock that says that its owner lives; what killed owners left is removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*/lock"):
        with contextlib.suppress(OSError), left.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_groups(left.parent.name)
            shutil.rmtree(left.parent)
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    partial = directory / "lock.partial"
    with partial.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        partial.rename(directory / "lock")
        try:
            yield directory
        finally:
            _remove_groups(directory.name)
            shutil.rmtree(directory)


@contextmanager
def _served(directory: Path, command: Sequence[str]) -> Iterator[Engine]:
    """Run a daemon in namespaces of its own, which end with this process."""
    alone = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            ("setpriv", "--pdeathsig", "KILL", *alone, *command),
            env={**os.environ, "CONTAINERS_CONF": str(directory / "containers.conf")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the terminal's Ctrl-C is the fixture's to handle
        )
    try:
        engine = Engine(f"unix://{directory}/docker.sock")
        _wait(engine, process, directory / "log")
        yield engine
    finally:
        _stop(process)


def _wait(engine: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(AssertionError):
            engine.docker("version")
            return
        if process.poll() is not None or time.monotonic() > end:
            pytest.fail(f"dockerd did not start: {log.read_text()[-2000:]}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let the daemon end in peace, removing what it made, or kill it with all it started."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_S)


def _remove_groups(name: str) -> None:
    for top in (p for p in Path("/sys/fs/cgroup").glob(f"*/{name}") if p.is_dir()):
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(directory).rmdir()

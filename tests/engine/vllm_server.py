"""A real vLLM server for tests, and the tiny policies it serves.

The server lives in a PID namespace of its own: killing the one process that this test started ends all of it,
and when the test itself is killed the kernel does that.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

import psutil

from legorl.config.compose import compose
from legorl.config.schema import ModelConfig
from legorl.engine.base import Sampling
from legorl.policy.model import random_policy

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
FLAGS = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-return-routed-experts")
"""What `legorl.engine.vllm_http` needs of a server."""
START_TIMEOUT_S = 600.0
CONTEXT = 4096


def tiny_moe() -> ModelConfig:
    """A mixture of experts: 4 layers, 2 of 8 experts per token."""
    return compose(["model=tiny_moe"]).model


def random_moe(directory: Path) -> Path:
    """An untrained one on disk."""
    return random_policy(tiny_moe(), directory, ["def check(value): return value"] * 4, seed=1)


class VllmServer:
    """`python -m vllm...api_server`, up when the context is entered and gone when it is left."""

    def __init__(
        self, model_dir: Path, log: Path, *, dtype: str = "float32", flags: tuple[str, ...] = ()
    ) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [
            *("setpriv", "--pdeathsig", "KILL", "--"),
            *("unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"),
            *(() if os.geteuid() == 0 else ("--user", "--map-root-user")),
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model_dir), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", dtype, "--max-model-len", str(CONTEXT), "--max-num-seqs", "16", "--enforce-eager"),
            *(
                "--enable-scale-out",
                "--logprobs-mode",
                "processed_logprobs",
                "--enable-return-routed-experts",
            ),
            *flags,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it (again) on its port and wait until it is healthy. It ends with the thread that calls."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log
            )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not self._healthy():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"vLLM did not come up:\n{self.log.read_text()[-4000:]}")
                time.sleep(0.25)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL to all of it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def freeze(self) -> None:
        """SIGSTOP to all of it: connections stay open and nothing answers."""
        for process in self.processes():
            process.suspend()

    def thaw(self) -> None:
        """Undo `freeze`."""
        for process in self.processes():
            process.resume()

    def processes(self) -> list[psutil.Process]:
        """Everything inside the namespace."""
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    def get(self, path: str, data: bytes | None = None) -> bytes:
        """A request to it, past the engine under test."""
        request = urllib.request.Request(
            self.url + path, data=data, headers={"content-type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as reply:
            return bytes(reply.read())

    def _healthy(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True


async def running(engine: Any) -> int:
    """Requests that the core of an engine works on."""
    from prometheus_client import REGISTRY

    # The gauge is set when a step ends, so there must be one.
    await engine.generate("nudge", [1], Sampling(max_tokens=1))
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return int(sum(sample.value for sample in samples if sample.name == "vllm:num_requests_running"))

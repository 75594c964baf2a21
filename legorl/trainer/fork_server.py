"""Warm start of Ray's workers on one machine: import the heavy modules once, fork a child for each worker.

Ten processes of a laptop run would each import torch, verl and vLLM for ten seconds; a fork takes half a
second and shares the memory. Only for a fresh local Ray cluster. Invariant: the server dies with its parent,
and a worker with its client (`fork_client`).

Started as `python -m legorl.trainer.fork_server SOCKET`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from legorl.sandbox.linux import set_parent_death_signal

PRELOAD = (
    "ray",
    "ray._private.workers.default_worker",
    "transfer_queue",
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "verl.workers.engine_workers",
    "verl.workers.engine",
    "verl.workers.rollout.llm_server",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen3.modeling_qwen3",
    "mlflow",
    "legorl.trainer.trainers",
    "legorl.trainer.agent_loop",
)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """In the child: take over the client's streams, environment and directory, and run its script."""
    set_parent_death_signal(signal.SIGKILL)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    for descriptor in descriptors:
        if descriptor > 2:
            os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    for entry in reversed(request["env"].get("PYTHONPATH", "").split(":")):
        if entry and entry not in sys.path:
            sys.path.insert(1, entry)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    random.seed()
    import numpy as np

    np.random.seed()
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    descriptors = array.array("i")
    size = descriptors.itemsize
    data, ancillary, _, _ = connection.recvmsg(65536, socket.CMSG_SPACE(3 * size))
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) // size * size])
    while data and not data.endswith(b"\0"):
        data += connection.recv(1 << 20)
    return json.loads(data[:-1]), list(descriptors)


def _reap(clients: dict[int, socket.socket]) -> None:
    """Tell the clients of ended workers their exit status."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        client = clients.pop(pid, None)
        if client is not None:
            with contextlib.suppress(OSError):
                client.sendall(b"%d" % os.waitstatus_to_exitcode(status))
            client.close()


def _abandoned(clients: dict[int, socket.socket]) -> None:
    """Kill workers whose client was killed: nobody could reach them any more."""
    readable, _, _ = select.select(list(clients.values()), [], [], 0)
    for pid, client in list(clients.items()):
        if client in readable and not client.recv(1):
            os.kill(pid, signal.SIGKILL)
            client.close()
            del clients[pid]


def serve(path: Path) -> None:
    """Preload, then fork on request until standard input (the parent's pipe) closes."""
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    partial = path.with_suffix(".starting")
    listener.bind(str(partial))
    listener.listen(64)
    partial.rename(path)
    clients: dict[int, socket.socket] = {}
    while True:
        watched: list[socket.socket | int] = [listener, 0]
        readable, _, _ = select.select(watched, [], [], 0.2)
        _reap(clients)
        _abandoned(clients)
        if 0 in readable and not os.read(0, 1):
            return
        if listener not in readable:
            continue
        connection, _ = listener.accept()
        request, descriptors = _receive(connection)
        pid = os.fork()
        if pid == 0:
            listener.close()
            _become(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(b"%d\n" % pid)
        clients[pid] = connection


if __name__ == "__main__":
    serve(Path(sys.argv[1]))

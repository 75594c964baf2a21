"""Weights from the trainer to a separate rollout engine over a loopback socket, without a GPU.

verl's plug-in point (`rollout.checkpoint_engine.custom_backend_module`): its own backends need NCCL, NIXL or
HCCL. Every wait ends after `_DEADLINE_S`.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
import zmq
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

_DEADLINE_S = 60


@CheckpointEngineRegistry.register("legorl_zmq")
class ZmqCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Rank 0 of the trainer answers one request of each rollout worker with the whole state."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.rank: int | None = None

    def prepare(self) -> dict[str, str]:
        """Open the socket on rank 0; its address reaches the others through `build_topology`."""
        if not self.is_master:
            return {}
        self._socket: Any = zmq.Context.instance().socket(zmq.REP)
        self._socket.setsockopt(zmq.RCVTIMEO, _DEADLINE_S * 1000)
        self._socket.setsockopt(zmq.SNDTIMEO, _DEADLINE_S * 1000)
        port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        return {"addr": f"tcp://127.0.0.1:{port}"}

    @classmethod
    def build_topology(
        cls, actor_ws: int, rollout_ws: int, metadata: list[dict[str, str]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group` for trainer ranks and rollout ranks."""
        address = metadata[0]["addr"]

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            n = len(ranks)
            return {"rank": ranks, "addr": [address] * n, "receivers": [rollout_ws] * n}

        return arguments(list(range(actor_ws))), arguments([-1 - i for i in range(rollout_ws)])

    def init_process_group(self, rank: int, addr: str, receivers: int) -> None:
        """Remember the topology."""
        self.rank, self._address, self._receivers = rank, addr, receivers

    def finalize(self) -> None:
        """Close the socket of rank 0."""
        if self.is_master:
            self._socket.close(0)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Serve the state to every receiver. All trainer ranks walk `weights`: gathering is collective."""
        state = {name: weight.detach().cpu().clone() for name, weight in weights}
        if not self.is_master:
            return {}
        blob = pickle.dumps(state)

        def serve() -> None:
            for _ in range(self._receivers):
                self._socket.recv()
                self._socket.send(blob, copy=False)

        await asyncio.get_running_loop().run_in_executor(None, serve)
        return {"weight_sync/bytes": float(len(blob))}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Fetch the state and yield its tensors."""

        def fetch() -> bytes:
            socket: Any = zmq.Context.instance().socket(zmq.REQ)
            socket.setsockopt(zmq.RCVTIMEO, _DEADLINE_S * 1000)
            try:
                socket.connect(self._address)
                socket.send(b"")
                return bytes(socket.recv())
            finally:
                socket.close(0)

        blob = await asyncio.get_running_loop().run_in_executor(None, fetch)
        for name, weight in pickle.loads(blob).items():
            yield name, weight

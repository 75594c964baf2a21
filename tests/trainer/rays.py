"""Ray on this machine for a module of tests, with verl's own load balancer over a rollout server of ours.

Imports nothing heavy at the top: every actor imports this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def local_ray(environment: dict[str, str] | None = None) -> Iterator[None]:
    """Ray's processes end with this one: it starts them to share its fate."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:  # its sockets need a short path
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100_000_000,
            _temp_dir=directory,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), **(environment or {})}},
            logging_level="ERROR",
            log_to_driver=False,
        )
        try:
            yield
        finally:
            ray.shutdown()


class RolloutServer:
    """Answers three tokens at version 5, or as it was told with `play`."""

    def __init__(self) -> None:
        self.running = 0
        self.stopped = 0
        self.play()

    def play(self, *, reply: int = 3, behaviour: str = "", changes: dict[str, Any] | None = None) -> None:
        """From now on. `behaviour`: `fail`, `hang`, or `update` (new weights cut the next reply short)."""
        self.reply, self.behaviour, self.changes = reply, behaviour, changes or {}
        self.version = 5
        self.params: dict[str, Any] = {}
        self.stopped = 0

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        """As verl's server has it."""
        self.params = sampling_params
        start = sampling_params["routed_experts_prompt_start"]
        answer = SimpleNamespace(
            token_ids=list(range(self.reply)),
            log_probs=[-1.0] * self.reply,
            routed_experts=np.zeros((len(prompt_ids) + self.reply - 1 - start, 2, 1), np.uint8),
            stop_reason="completed",
            num_preempted=None,
            extra_fields={"global_steps": self.version},
        )
        if self.behaviour == "fail":
            raise RuntimeError("core died")
        if self.behaviour == "hang":
            self.running += 1
            try:
                await asyncio.sleep(60)
            finally:
                self.running -= 1
                self.stopped += 1
        if self.behaviour == "update":
            answer.stop_reason, self.behaviour, self.version = "aborted", "", 6
        for name, value in self.changes.items():
            setattr(answer, name, value)
        return answer

    def state(self) -> dict[str, Any]:
        """For the test."""
        return {"running": self.running, "stopped": self.stopped, "params": self.params}


def balancer(server: Any) -> Any:
    """Handle of verl's, over one server."""
    import ray
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    return ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote({"server": server})

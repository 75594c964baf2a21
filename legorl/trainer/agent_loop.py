"""One trial per call of verl's agent loop: the harness drives, the proxy records, rows come back.

Everything shared by the trials of a worker process (proxy, sandboxes, harness, pool) is built once, on first
use, by `TrialWorkshop`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from legorl.config.resolved import load_config
from legorl.tracking.events import EventLog, Trial
from legorl.trainer.batch import RoutingShape, outputs, placeholder
from legorl.trainer.engine import VerlEngine
from legorl.trainer.workshop import open_runner
from legorl.trial.runner import TrialRequest

_workshops: dict[Path, asyncio.Task[TrialWorkshop]] = {}


class TrialWorkshop:
    """What the trials of one process share."""

    def __init__(self, run_dir: Path, client: Any, tokenizer: Any, routing: RoutingShape | None) -> None:
        self.run_dir = run_dir
        self.config = load_config(run_dir)
        self.events = EventLog(run_dir)
        self.pad_id = int(tokenizer.pad_token_id)
        self.routing = routing
        self._engine = VerlEngine(client, timeout_s=self.config.engine.request_timeout_s)

    async def start(self) -> None:
        """Open proxy, sandboxes and harness."""
        self.runner, self.pool = await open_runner(self.config, self._engine, self.run_dir)


async def _workshop(run_dir: Path, client: Any, tokenizer: Any, routing: RoutingShape | None) -> TrialWorkshop:
    """The process's workshop; the first caller builds it, the others wait for it."""

    async def build() -> TrialWorkshop:
        workshop = TrialWorkshop(run_dir, client, tokenizer, routing)
        await workshop.start()
        return workshop

    if run_dir not in _workshops:
        _workshops[run_dir] = asyncio.create_task(build())
    return await asyncio.shield(_workshops[run_dir])


class TrialAgentLoop:
    """Instantiated by verl for every trial, by the name in `agent_loop.yaml`."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, run_dir: str, **_: Any) -> None:
        self._config = trainer_config.config
        self._client = server_manager
        self._tokenizer = tokenizer
        self._run_dir = Path(run_dir)

    def _routing(self) -> RoutingShape | None:
        if not self._config.actor_rollout_ref.rollout.enable_rollout_routing_replay:
            return None
        from transformers import AutoConfig

        model = AutoConfig.from_pretrained(self._config.actor_rollout_ref.model.path)
        return RoutingShape(model.num_hidden_layers, model.num_experts_per_tok)

    async def run(self, sampling_params: dict[str, Any], **prompt: Any) -> Any:
        """Run one trial.

        Args:
            sampling_params: verl's; the run's own sampling is enforced by the proxy, they are equal.
            prompt: the row of the data set, plus `uid` (the group), `session_id` and `global_steps`.

        Returns:
            A list of `AgentLoopOutput`, one per segment.
        """
        known = self._run_dir in _workshops
        workshop = await _workshop(
            self._run_dir, self._client, self._tokenizer, None if known else self._routing()
        )
        info = prompt["extra_info"]
        step, session = int(prompt["global_steps"]), int(prompt["session_id"])
        task = workshop.pool.task(info["task"])
        group = f"{info['split']}-{step:04d}-{prompt['uid'][:8]}"
        result = await workshop.runner.run(
            TrialRequest(
                task=task,
                trial_id=f"{task.id}-{step:04d}-{prompt['uid'][:6]}-{session}",
                group=group,
                step=step,
                split=info["split"],
            )
        )
        record = result.record
        workshop.events.write(Trial(record))
        if info["split"] != "train":
            return [placeholder(record, workshop.routing, workshop.pad_id, step)]
        return outputs(record, result.rows, workshop.routing, workshop.pad_id, step)

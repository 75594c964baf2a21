"""One trial per call of verl's agent loop: the harness drives, the proxy records, rows come back.

What the trials of a worker process share (proxy, sandboxes, harness, pool) is opened once, on first use, and
lives as long as the process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl.config.resolved import load_config
from legorl.engine.vllm_parser import vllm_parser
from legorl.sandbox.pool import SandboxPool
from legorl.tasks.pool import Pool
from legorl.tracking import events as tracked
from legorl.tracking.events import EventLog, Fatal, Trial
from legorl.trainer.batch import RoutingShape, outputs, placeholder
from legorl.trainer.engine import VerlEngine
from legorl.trainer.inputs import open_pool
from legorl.trial.one import open_workshop
from legorl.trial.runner import TrialRequest, TrialRunner


@dataclass(frozen=True)
class _Shared:
    """What the trials of one process share."""

    runner: TrialRunner
    pool: Pool
    events: EventLog
    routing: RoutingShape | None
    pad_id: int
    stack: AsyncExitStack
    """Holds the open workshop."""
    telling: asyncio.Task[None]
    """Writes the pool's numbers into the event log."""


_POOL_S = 20.0
"""Between two events about the sandbox pool."""
_shared: dict[Path, asyncio.Task[_Shared]] = {}


async def _open(run_dir: Path, verl_config: Any, client: Any, tokenizer: Any) -> _Shared:
    config = load_config(run_dir)
    model_dir = Path(verl_config.actor_rollout_ref.model.path)
    parser = await asyncio.to_thread(vllm_parser, config.model, model_dir)
    engine = VerlEngine(
        client, timeout_s=config.engine.request_timeout_s, routed=config.backend.router_replay
    )
    stack = AsyncExitStack()
    workshop = await stack.enter_async_context(open_workshop(config, engine, model_dir, parser, run_dir))
    routing = None
    if config.backend.router_replay:
        from transformers import AutoConfig

        model = AutoConfig.from_pretrained(model_dir)
        routing = RoutingShape(model.num_hidden_layers, model.num_experts_per_tok)
    events, sandboxes = EventLog(run_dir), workshop.runner.pool
    sandboxes.breaker.tell = lambda text: events.write(tracked.Warning(text))
    telling = asyncio.create_task(_tell(sandboxes, events))
    return _Shared(
        workshop.runner, open_pool(config), events, routing, int(tokenizer.pad_token_id), stack, telling
    )


async def _tell(sandboxes: SandboxPool, events: EventLog) -> None:
    """An event now and then, when something happened."""
    last = sandboxes.stats()
    while True:
        await asyncio.sleep(_POOL_S)
        stats = sandboxes.stats()
        if stats != last:
            events.write(tracked.Pool(pid=os.getpid(), **dataclasses.asdict(stats)))
            last = stats


class TrialAgentLoop:
    """Instantiated by verl for every trial, by the name in `agent_loop.yaml`."""

    def __init__(
        self, trainer_config: Any, server_manager: Any, tokenizer: Any, run_dir: str, **_: Any
    ) -> None:
        self._config = trainer_config.config
        self._client = server_manager
        self._tokenizer = tokenizer
        self._run_dir = Path(run_dir)

    async def _share(self) -> _Shared:
        """The first caller opens, the others wait for it."""
        if self._run_dir not in _shared:
            opening = _open(self._run_dir, self._config, self._client, self._tokenizer)
            _shared[self._run_dir] = asyncio.create_task(opening)
        return await asyncio.shield(_shared[self._run_dir])

    async def run(self, sampling_params: dict[str, Any], **prompt: Any) -> Any:
        """Run one trial.

        Args:
            sampling_params: verl's; the run's own sampling is enforced by the proxy, they are equal.
            prompt: the row of the data set, plus `uid` (the group), `session_id` and `global_steps`.

        Returns:
            A list of `AgentLoopOutput`, one per segment.
        """
        try:
            shared = await self._share()
        except Exception as error:
            # verl only logs it and goes on without the row: say here why there will be no trial at all.
            log = EventLog(self._run_dir)
            log.write(Fatal(f"No trial can start: {type(error).__name__}: {error}"))
            log.close()
            raise
        info = prompt["extra_info"]
        step, session, uid = int(prompt["global_steps"]), int(prompt["session_id"]), str(prompt["uid"])
        task = shared.pool.task(info["task"])
        result = await shared.runner.run(
            TrialRequest(
                task=task,
                trial_id=f"{task.id}-{uid[:6]}-{session}",
                group=f"{task.id}-{uid[:8]}",
                step=step,
                split=info["split"],
            )
        )
        shared.events.write(Trial(result.record))
        if info["split"] != "train":
            return [placeholder(result.record, shared.routing, shared.pad_id, step)]
        return outputs(result.record, result.rows, shared.routing, shared.pad_id, step)

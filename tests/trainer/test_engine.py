"""`VerlEngine` against a stand-in for verl's load balancer and server (no Ray): versions, aborts, errors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from legorl.engine.base import Finish, Sampling
from legorl.errors import EngineError

engine_module = pytest.importorskip("legorl.trainer.engine", reason="needs the cpu extra")

pytestmark = pytest.mark.integration


class Remote:
    """A method of a Ray actor handle."""

    def __init__(self, function: Any) -> None:
        self.remote = function


class Server:
    """Answers with `reply` tokens at `version`, or hangs until aborted."""

    def __init__(self, reply: int = 3, hang: bool = False, fail: Exception | None = None) -> None:
        self.reply, self.hang, self.fail = reply, hang, fail
        self.aborted: list[str] = []
        self.params: dict[str, Any] = {}
        self.generate = Remote(self._generate)
        self.abort_request = Remote(lambda request_id, reset_prefix_cache: self.aborted.append(request_id))

    async def _generate(self, **kwargs: Any) -> Any:
        self.params = kwargs["sampling_params"]
        if self.fail is not None:
            raise self.fail
        if self.hang:
            await asyncio.sleep(60)
        return SimpleNamespace(
            token_ids=list(range(self.reply)),
            log_probs=[-1.0] * self.reply,
            routed_experts=np.zeros((4, 2, 1), dtype=np.int16),
            stop_reason="completed",
            num_preempted=None,
            extra_fields={"global_steps": 5},
        )


def open_engine(server: Server, timeout_s: float = 5.0) -> Any:
    async def acquire(request_id: str) -> tuple[str, Server]:
        return "server", server

    async def no_fields() -> list[str]:
        return []

    balancer = SimpleNamespace(
        acquire_server=Remote(acquire),
        release_server=Remote(lambda server_id: None),
        require_acquire_fields=Remote(no_fields),
        require_release_fields=Remote(no_fields),
    )
    rollout = SimpleNamespace(full_determinism=False, name="vllm")
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    return engine_module.VerlEngine(
        engine_module.SyncClient(config=config, load_balancer_handle=balancer), timeout_s=timeout_s
    )


async def test_a_sample_has_version_logprobs_and_only_the_new_routing() -> None:
    server = Server()
    sample = await open_engine(server).generate("r1", [1, 2, 3], Sampling(max_tokens=8), routed_from=2)
    assert sample.weight_version.tolist() == [5, 5, 5]
    assert sample.logprobs.dtype == np.float32
    assert sample.finish is Finish.STOP
    assert sample.routed_experts is not None
    assert sample.routed_experts.dtype == np.uint8
    assert (sample.routed_start, server.params["routed_experts_prompt_start"]) == (2, 2)


async def test_as_many_tokens_as_allowed_is_a_length_finish() -> None:
    sample = await open_engine(Server(reply=8)).generate("r1", [1], Sampling(max_tokens=8))
    assert sample.finish is Finish.LENGTH


async def test_a_silent_engine_is_aborted_and_named() -> None:
    server = Server(hang=True)
    with pytest.raises(EngineError, match="did not answer"):
        await open_engine(server, timeout_s=0.1).generate("r1", [1], Sampling())
    assert server.aborted == ["r1-1"]


async def test_cancelling_a_request_aborts_it() -> None:
    server = Server(hang=True)
    task = asyncio.create_task(open_engine(server).generate("r1", [1], Sampling()))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.aborted == ["r1-1"]


async def test_a_dead_engine_is_infrastructure() -> None:
    with pytest.raises(EngineError, match="core died"):
        await open_engine(Server(fail=RuntimeError("core died"))).generate("r1", [1], Sampling())

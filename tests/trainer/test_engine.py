"""`VerlEngine` over verl's own client and load balancer and a rollout server of ours, in real Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from legorl.engine.base import Finish, Sampling
from legorl.errors import EngineError
from tests.trainer.rays import RolloutServer, balancer, local_ray

engine_module = pytest.importorskip("legorl.trainer.engine", reason="needs the cpu extra")
ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


class Stage:
    """An engine, and the server it talks to."""

    def __init__(self) -> None:
        self.server = ray.remote(RolloutServer).options(num_cpus=0, max_concurrency=8).remote()
        self.balancer = balancer(self.server)
        ray.get([self.server.state.remote(), self.balancer.get_status.remote()], timeout=120)

    def engine(self, timeout_s: float = 20.0, client: str = "SyncClient") -> Any:
        rollout = SimpleNamespace(full_determinism=False, name="vllm")
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        verls = getattr(engine_module, client)(config=config, load_balancer_handle=self.balancer)
        return engine_module.VerlEngine(verls, timeout_s=timeout_s, routed=True)

    async def play(self, **how: Any) -> None:
        """See `RolloutServer.play`."""
        await self.server.play.remote(**how)

    async def state(self, key: str) -> Any:
        """See `RolloutServer.state`."""
        return (await self.server.state.remote())[key]

    async def settles(self, key: str, value: object) -> None:
        """Waits until the server is in that state."""
        async with asyncio.timeout(30):
            while await self.state(key) != value:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with local_ray():
        yield Stage()


async def test_a_sample_has_version_logprobs_and_only_the_new_routing(stage: Stage) -> None:
    await stage.play()
    prompt = np.array([1, 2, 3], np.int32)
    sample = await stage.engine().generate("r1", prompt, Sampling(max_tokens=8), routed_from=2)
    assert sample.weight_version.tolist() == [5, 5, 5]
    assert sample.logprobs.dtype == np.float32
    assert sample.finish is Finish.STOP
    assert sample.routed_experts is not None
    assert sample.routed_experts.dtype == np.uint8
    assert sample.routed_experts.shape == (3, 2, 1)
    params = await stage.state("params")
    assert (sample.routed_start, params["routed_experts_prompt_start"]) == (2, 2)


async def test_as_many_tokens_as_allowed_is_a_length_finish(stage: Stage) -> None:
    await stage.play(reply=8)
    sample = await stage.engine().generate("r1", [1], Sampling(max_tokens=8))
    assert sample.finish is Finish.LENGTH


async def test_a_reply_that_new_weights_interrupted_has_both_versions(stage: Stage) -> None:
    await stage.play(behaviour="update")
    engine = stage.engine(client="AsyncClient")
    sample = await engine.generate("r1", [1, 2], Sampling(max_tokens=16), routed_from=1)
    assert sample.weight_version.tolist() == [5, 5, 5, 6, 6, 6]
    assert sample.routed_experts is not None
    assert len(sample.routed_experts) == 2 + 6 - 1 - 1


@pytest.mark.parametrize("client", ["SyncClient", "AsyncClient"])
@pytest.mark.parametrize("how", ["abort", "leave", "deadline"])
async def test_what_nobody_waits_for_is_stopped_in_the_server(stage: Stage, how: str, client: str) -> None:
    await stage.play(behaviour="hang")
    engine = stage.engine(2.0 if how == "deadline" else 20.0, client)
    task = asyncio.create_task(engine.generate("r1", [1], Sampling()))
    await stage.settles("running", 1)
    if how == "abort":
        await engine.abort("unknown")
        await engine.abort("r1")
        assert (await task).finish is Finish.ABORT
    elif how == "leave":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        with pytest.raises(EngineError, match="did not answer request r1 within 2 s"):
            await task
    await stage.settles("running", 0)
    assert await stage.state("stopped") == 1
    async with asyncio.timeout(10):
        while await stage.balancer.get_total_inflight.remote():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_probs": None}, "3 tokens, 0 log-probabilities"),
        ({"routed_experts": None}, "returned no routed experts"),
        ({"routed_experts": np.zeros((9, 2, 1), np.uint8)}, "9 routing rows, 3 were expected"),
        ({"routed_experts": np.zeros((3, 2, 1), np.int16)}, "int16"),
        ({"stop_reason": "repetition"}, "'repetition'"),
        ({"extra_fields": {}}, "a token without its weight version"),
    ],
)
async def test_an_answer_that_lacks_something_is_an_error(
    stage: Stage, changes: dict[str, Any], message: str
) -> None:
    await stage.play(changes=changes)
    with pytest.raises(EngineError, match=message):
        await stage.engine().generate("r1", [1], Sampling())


async def test_a_dead_engine_is_infrastructure(stage: Stage) -> None:
    """The last test: the server does not survive it."""
    await stage.play(behaviour="fail")
    with pytest.raises(EngineError, match="core died"):
        await stage.engine().generate("r1", [1], Sampling())
    await stage.play(behaviour="hang")
    task = asyncio.create_task(stage.engine().generate("r1", [1], Sampling()))
    await stage.settles("running", 1)
    ray.kill(stage.server)
    with pytest.raises(EngineError, match="failed on request r1: Actor"):
        await task

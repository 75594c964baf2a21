"""The HTTP engine against a server of ours that speaks vLLM's wire and misbehaves on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from legorl.engine.base import Finish, Sampling
from legorl.engine.router import Router
from legorl.engine.vllm_http import VllmHttpEngine
from legorl.errors import EngineDownError, EngineError, EngineLostError
from tests.engine.fake_vllm import CHOSEN, LAYERS, FakeVllm, npy

PROMPT = [4, 5, 6, 7, 8]


class Stage:
    """A running fake and engines on it."""

    def __init__(self, server: FakeVllm) -> None:
        self.server, self.url = server, server.url
        self.engines: list[VllmHttpEngine] = []

    def engine(
        self, timeout_s: float = 5.0, routed: bool = True, version: int | None = None
    ) -> VllmHttpEngine:
        self.engines.append(
            VllmHttpEngine(self.url, timeout_s=timeout_s, routed=routed, weight_version=version)
        )
        return self.engines[-1]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage(await FakeVllm().start())
    yield stage
    for engine in stage.engines:
        await engine.close()
    await stage.server.stop()


async def test_an_answer_becomes_a_sample(stage: Stage) -> None:
    prompt = np.array(PROMPT, np.int32)
    sampling = Sampling(temperature=0.7, top_p=0.9, max_tokens=8)
    sample = await stage.engine().generate("r", prompt[:], sampling, routed_from=2)
    assert sample.token_ids.tolist() == [1, 2, 3]
    assert sample.finish is Finish.STOP
    assert sample.routed_experts is not None
    assert sample.routed_experts.tolist()[0] == [[0, 1], [2, 3], [4, 5]]
    assert sample.routed_experts.shape == (5 + 3 - 1 - 2, LAYERS, CHOSEN)
    assert sample.weight_version.tolist() == [0, 0, 0]
    asked = stage.server.asked[0]
    assert asked["token_ids"] == PROMPT
    params = asked["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 0.9, -1)
    assert params["routed_experts_prompt_start"] == 2


async def test_many_experts_come_as_uint16(stage: Stage) -> None:
    stage.server.dtype = np.uint16
    sample = await stage.engine().generate("r", PROMPT, Sampling())
    assert sample.routed_experts is not None
    assert sample.routed_experts.dtype == np.uint16


def _choice(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(answer: dict[str, Any]) -> None:
        for name, value in changes.items():
            if value is ...:
                del answer["choices"][0][name]
            else:
                answer["choices"][0][name] = value

    return spoil


def _logprob(value: object) -> Callable[[dict[str, Any]], None]:
    def spoil(answer: dict[str, Any]) -> None:
        answer["choices"][0]["logprobs"]["content"][1]["logprob"] = value

    return spoil


ROWS = np.zeros((7, LAYERS, CHOSEN), np.uint8)
SPOILED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no choices": (lambda answer: answer.update(choices=[]), "cannot be read"),
    "choices of a wrong type": (lambda answer: answer.update(choices="no"), "cannot be read"),
    "no ids": (_choice(token_ids=...), "cannot be read"),
    "ids as text": (_choice(token_ids=["a"]), "cannot be read"),
    "an id too large": (_choice(token_ids=[1, 2, 2**40]), "cannot be read"),
    "an id too many": (_choice(token_ids=[1, 2, 3, 4]), "4 tokens, 3 log-probabilities"),
    "no log-probs": (_choice(logprobs=None), "cannot be read"),
    "a log-prob left out": (_logprob(-9999.0), "without its log-probability"),
    "a log-prob null": (_logprob(None), "without its log-probability|cannot be read"),
    "an unknown finish": (_choice(finish_reason="error"), "'error'"),
    "no finish": (_choice(finish_reason=None), "None"),
    "no rows": (_choice(routed_experts=None), "--enable-return-routed-experts"),
    "rows not base64": (_choice(routed_experts="%%%"), "cannot be read"),
    "rows pickled": (_choice(routed_experts=npy(ROWS, pickled=True)), "cannot be read"),
    "rows too few": (_choice(routed_experts=npy(ROWS[1:])), "6 routing rows, 7 were expected"),
    "rows flat": (_choice(routed_experts=npy(ROWS.ravel())), "of shape"),
    "rows of floats": (_choice(routed_experts=npy(ROWS.astype(float))), "float64"),
    "spans that leave a token out": (
        _choice(weight_versions=[{"version": "1", "start": 0, "end": 2}]),
        "do not cover",
    ),
}


@pytest.mark.parametrize("case", sorted(SPOILED))
async def test_an_answer_that_lacks_something_is_an_error(stage: Stage, case: str) -> None:
    stage.server.spoil, message = SPOILED[case]
    with pytest.raises(EngineError, match=message) as caught:
        await stage.engine().generate("r7", PROMPT, Sampling())
    assert stage.url in str(caught.value)
    assert not isinstance(caught.value, EngineDownError)  # it had taken the request


@pytest.mark.parametrize(
    ("status", "raw", "message"),
    [
        (500, b"core dumped", "with 500: core dumped"),
        (503, b"", r"with 503: \(empty\)"),
        (404, None, "--enable-scale-out"),
        (302, None, "with 302"),
        (400, b"prompt too long", "with 400: prompt too long"),
        (200, b"<html>", "no JSON"),
        (200, b"[1]", "no JSON object"),
        (200, b"\xff\xfe", "no JSON"),
    ],
)
async def test_a_wrong_answer_is_named(stage: Stage, status: int, raw: bytes | None, message: str) -> None:
    stage.server.status, stage.server.raw = status, raw
    with pytest.raises(EngineError, match=message):
        await stage.engine(version=3).generate("r", PROMPT, Sampling())


async def test_a_version_that_cannot_be_asked_for_says_what_to_do(stage: Stage) -> None:
    stage.server.status = 404
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        await stage.engine().generate("r", PROMPT, Sampling())


async def test_versions_are_the_servers(stage: Stage) -> None:
    stage.server.version = "12"
    sample = await stage.engine().generate("r", PROMPT, Sampling())
    assert sample.weight_version.tolist() == [12, 12, 12]
    stage.server.versions = ["12", "13"]
    with pytest.raises(EngineError, match="from version 12 to 13"):
        await stage.engine().generate("r", PROMPT, Sampling())
    stage.server.version = "final"
    with pytest.raises(EngineError, match="'final', which is no policy version"):
        await stage.engine().generate("r", PROMPT, Sampling())


async def test_spans_say_which_weights_sampled_what(stage: Stage) -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    stage.server.spoil = _choice(weight_versions=spans)
    stage.server.versions = ["default", "4"]
    sample = await stage.engine().generate("r", PROMPT, Sampling())
    assert sample.weight_version.tolist() == [0, 4, 4]


async def test_a_fixed_version_is_not_asked_for(stage: Stage) -> None:
    sample = await stage.engine(version=9).generate("r", PROMPT, Sampling())
    assert sample.weight_version.tolist() == [9, 9, 9]
    assert stage.server.paths == ["/inference/v1/generate"]


async def test_a_dense_policy_has_no_rows(stage: Stage) -> None:
    stage.server.spoil = _choice(routed_experts=None)
    sample = await stage.engine(routed=False).generate("r", PROMPT, Sampling())
    assert sample.routed_experts is None


async def test_a_broken_connection_is_not_a_refused_one(stage: Stage) -> None:
    stage.server.cut = True
    with pytest.raises(EngineError, match="broke off POST") as caught:
        await stage.engine(version=0).generate("r", PROMPT, Sampling())
    assert not isinstance(caught.value, EngineDownError)


async def test_nobody_there_took_nothing() -> None:
    engine = VllmHttpEngine("http://127.0.0.1:9", timeout_s=5)
    try:
        with pytest.raises(EngineDownError, match="cannot be reached"):
            await engine.generate("r", PROMPT, Sampling())
        with pytest.raises(EngineDownError):
            await engine.check()
    finally:
        await engine.close()


async def test_the_deadline_closes_the_connection(stage: Stage) -> None:
    stage.server.hang = True
    with pytest.raises(EngineError, match=r"request r within 0\.2 s.*engine\.request_timeout_s"):
        await stage.engine(timeout_s=0.2).generate("r", PROMPT, Sampling())
    async with asyncio.timeout(5):
        while stage.server.running:  # noqa: ASYNC110 - the server notices by itself
            await asyncio.sleep(0.01)


async def test_closing_ends_what_is_in_flight(stage: Stage) -> None:
    stage.server.hang = True
    engine = stage.engine()
    task = asyncio.create_task(engine.generate("r", PROMPT, Sampling()))
    await asyncio.sleep(0.1)
    await engine.close()
    assert (await task).finish is Finish.ABORT
    with pytest.raises(EngineError, match="is closed"):
        await engine.generate("s", PROMPT, Sampling())


async def test_open_finds_raw_logprobs(stage: Stage) -> None:
    engine = await VllmHttpEngine.open(stage.url, timeout_s=5, routed=True)
    await engine.close()
    stage.server.spoil = lambda answer: answer["choices"][0]["logprobs"]["content"][0].update(logprob=-3.0)
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        await VllmHttpEngine.open(stage.url, timeout_s=5, routed=True)


async def test_a_router_over_servers_that_die_and_come_back() -> None:
    servers = [await FakeVllm().start() for _ in range(2)]
    engines = [VllmHttpEngine(server.url, timeout_s=20, routed=True) for server in servers]
    router = Router(engines, check_every_s=0.1)
    try:
        await router.generate("a1", PROMPT, Sampling(), sticky="a")
        await router.generate("b1", PROMPT, Sampling(), sticky="b")
        assert [len(server.asked) for server in servers] == [1, 1]
        servers[0].hang = True
        flight = asyncio.create_task(router.generate("a2", PROMPT, Sampling(), sticky="a"))
        async with asyncio.timeout(5):
            while len(servers[0].asked) < 2:  # noqa: ASYNC110 - the server does not tell
                await asyncio.sleep(0.01)
        await servers[0].stop()
        with pytest.raises(EngineLostError, match="with request a2 in flight") as caught:
            await flight
        assert servers[0].url in caught.value.engine
        await router.generate("a3", PROMPT, Sampling(), sticky="a")
        assert servers[1].asked[-1]["request_id"] == "a3"
        servers[0].hang = False
        await servers[0].start()
        async with asyncio.timeout(5):
            while not servers[0].asked[-1]["request_id"].startswith("probe"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await router.generate("c1", PROMPT, Sampling(), sticky="c")
        assert servers[0].asked[-1]["request_id"] == "c1"
        for server in servers:
            await server.stop()
        with pytest.raises(EngineDownError, match=r"No engine is alive: .*; Engine"):
            await router.generate("c2", PROMPT, Sampling(), sticky="c")
    finally:
        await router.close()
        for server in servers:
            await server.stop()

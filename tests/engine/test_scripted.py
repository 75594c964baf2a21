"""The scripted engine keeps the bookkeeping of a real one."""

from __future__ import annotations

import asyncio
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from legorl.engine.base import Finish, Sampling
from legorl.engine.scripted import ScriptedEngine
from legorl.errors import EngineError
from tests.proxy.models import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


async def test_a_reply_ends_with_the_end_token(tokenizer: Tokenizer) -> None:
    seen = []

    def policy(prompt: str, rng: Random) -> str:
        seen.append(prompt)
        return "Done."

    engine = ScriptedEngine(policy, tokenizer, routing=(3, 2, 8))
    prompt = tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids
    sample = await engine.generate("r", prompt, Sampling(), routed_from=2)
    assert seen == ["<|im_start|>user\nHi<|im_end|>"]
    assert tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=False) == "Done.<|im_end|>"
    assert sample.finish is Finish.STOP
    assert sample.token_ids.dtype == np.int32
    assert (sample.logprobs < 0).all()
    assert len(sample.logprobs) == len(sample.weight_version) == len(sample.token_ids)
    assert sample.routed_experts is not None
    assert sample.routed_experts.shape == (len(prompt) + len(sample.token_ids) - 1 - 2, 3, 2)
    assert sample.routed_start == 2


async def test_the_token_limit_cuts(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(lambda prompt, rng: "one two three four", tokenizer)
    sample = await engine.generate("r", [5], Sampling(max_tokens=2))
    assert sample.finish is Finish.LENGTH
    assert len(sample.token_ids) == 2


async def test_the_same_seed_gives_the_same_replies(tokenizer: Tokenizer) -> None:
    async def replies(seed: int) -> list[list[int]]:
        engine = ScriptedEngine(lambda prompt, rng: str(rng.random()), tokenizer, seed)
        return [(await engine.generate(str(n), [5], Sampling())).token_ids.tolist() for n in range(3)]

    assert await replies(1) == await replies(1)
    assert await replies(1) != await replies(2)


async def test_abort_ends_a_running_request(tokenizer: Tokenizer) -> None:
    async def policy(prompt: str, rng: Random) -> str:
        await asyncio.sleep(60)
        return "late"

    engine = ScriptedEngine(policy, tokenizer)
    task = asyncio.create_task(engine.generate("r", [5], Sampling()))
    await asyncio.sleep(0.01)
    with pytest.raises(EngineError, match="running already"):
        await engine.generate("r", [5], Sampling())
    await engine.abort("unknown")
    await engine.abort("r")
    async with asyncio.timeout(2):
        sample = await task
    assert sample.finish is Finish.ABORT
    assert not engine.running


def test_an_unknown_end_token_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(EngineError, match="no token"):
        ScriptedEngine(lambda prompt, rng: "", tokenizer, end_token="<nope>")

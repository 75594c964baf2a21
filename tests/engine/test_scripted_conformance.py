"""The scripted engine does what every engine must."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from legorl.engine.base import Sampling
from legorl.engine.scripted import ScriptedEngine
from tests.engine.conformance import ENDLESS_PROMPT, EngineConformance, Subject
from tests.proxy.models import build_tokenizer


class TestScripted(EngineConformance):
    """A policy that writes a few words, and never ends where it is asked for an endless reply."""

    @pytest.fixture
    def subject(self) -> Subject:
        tokenizer = build_tokenizer()
        endless = tokenizer.decode(ENDLESS_PROMPT, skip_special_tokens=False)

        async def policy(prompt: str, rng: Random) -> str:
            if prompt == endless:
                await asyncio.sleep(3600)
            return "one two three four five six"

        engine = ScriptedEngine(policy, tokenizer, routing=(4, 2, 8))
        return Subject(engine, lambda: asyncio.sleep(0, len(engine.running)), Sampling())

"""An engine whose policy is a function: for experts, tests and replays.

Invariant: what it returns has the shape and the bookkeeping of a real engine's sample (ids of
the given tokenizer, finite log-probs, a weight version, routing rows only from where they are asked for), so
that everything behind it is exercised; the log-probs themselves mean nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from legorl.engine.base import Finish, Sample, Sampling
from legorl.errors import EngineError

Policy = Callable[[str, random.Random], str | Awaitable[str]]
"""From the prompt's text, special tokens kept, and a source of randomness to the reply's text."""


class ScriptedEngine:
    """See the module. `routing` is (layers, experts per token, experts): fake rows, constant per token."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        seed: int = 0,
        *,
        end_token: str = "<|im_end|>",
        routing: tuple[int, int, int] | None = None,
    ) -> None:
        end_id = tokenizer.token_to_id(end_token)
        if end_id is None:
            raise EngineError(f"The tokenizer has no token {end_token!r}.")
        self._policy = policy
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._end_id = int(end_id)
        self._routing = routing
        self.running: dict[str, asyncio.Event] = {}
        """Requests in flight; the event aborts one."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        routed_from: int = 0,
        sticky: str = "",
    ) -> Sample:
        """See `TokenEngine.generate`."""
        if request_id in self.running:
            raise EngineError(f"Request {request_id} is running already.")
        prompt = np.array(prompt_ids, dtype=np.int32)
        rng = random.Random(self._rng.random())
        aborted = self.running[request_id] = asyncio.Event()
        try:
            text = await self._reply(prompt, rng, aborted)
        finally:
            del self.running[request_id]
        if text is None:
            return self._sample(prompt, np.empty(0, np.int32), Finish.ABORT, routed_from, rng)
        ids = np.array(
            [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end_id], dtype=np.int32
        )
        finish = Finish.STOP if len(ids) <= sampling.max_tokens else Finish.LENGTH
        return self._sample(prompt, ids[: sampling.max_tokens], finish, routed_from, rng)

    async def abort(self, request_id: str) -> None:
        """See `TokenEngine.abort`."""
        event = self.running.get(request_id)
        if event is not None:
            event.set()

    async def close(self) -> None:
        """End every running request."""
        for event in self.running.values():
            event.set()

    async def _reply(
        self, prompt: NDArray[np.int32], rng: random.Random, aborted: asyncio.Event
    ) -> str | None:
        answer = self._policy(self._tokenizer.decode(prompt.tolist(), skip_special_tokens=False), rng)
        if not inspect.isawaitable(answer):
            return answer
        reply = asyncio.ensure_future(answer)
        abort = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait({reply, abort}, return_when=asyncio.FIRST_COMPLETED)
            return reply.result() if reply.done() else None
        finally:
            reply.cancel()
            abort.cancel()

    def _sample(
        self,
        prompt: NDArray[np.int32],
        ids: NDArray[np.int32],
        finish: Finish,
        routed_from: int,
        rng: random.Random,
    ) -> Sample:
        logprobs = np.array([-rng.expovariate(4.0) for _ in ids], dtype=np.float32)
        routed = None
        if self._routing is not None:
            routed = fake_routing(np.concatenate([prompt, ids])[routed_from:-1], self._routing)
        return Sample(
            token_ids=ids,
            logprobs=logprobs,
            weight_version=np.zeros(len(ids), np.int32),
            finish=finish,
            routed_experts=routed,
            routed_start=routed_from,
        )


def fake_routing(ids: NDArray[np.int32], routing: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Routing rows that depend on the token alone, uint8 [n, layers, experts per token]."""
    layers, chosen, experts = routing
    offsets = np.arange(layers)[:, None] * 3 + np.arange(chosen)[None, :]
    return ((ids[:, None, None] + offsets) % experts).astype(np.uint8)

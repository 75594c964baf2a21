"""verl's rollout servers as a `TokenEngine`: token ids in, `Sample` out.

Invariant (I1): every token carries the policy version of the server that sampled it, also when a weight
update interrupted the reply and another version finished it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from legorl.engine.assemble import aborted, assemble
from legorl.engine.base import Sample, Sampling
from legorl.engine.calls import Calls
from legorl.errors import EngineError

Spans = list[tuple[int, int]]
"""How many tokens which version sampled, in order."""

_SPANS: ContextVar[Spans | None] = ContextVar("legorl_spans", default=None)
"""Of the request that this task is about."""


class _RecordingServer:
    """A rollout server's handle that notes (tokens, version) of each reply, and stops what nobody awaits."""

    def __init__(self, server: Any, spans: Spans) -> None:
        self._server, self._spans = server, spans
        self.generate = self

    async def remote(self, **kwargs: Any) -> Any:
        """`handle.generate.remote(...)`."""
        reference = self._server.generate.remote(**kwargs)
        try:
            output = await reference
        except asyncio.CancelledError:
            # verl's `abort_request` knows only ids that vLLM has since made its own, so it never finds one. A
            # cancelled actor task leaves vLLM's generator, on which vLLM stops the request.
            ray.cancel(reference)
            raise
        version = output.extra_fields.get("global_steps")
        self._spans.append((len(output.token_ids), -1 if version is None else int(version)))
        return output


class _Recording(LLMServerClient):  # type: ignore[misc]
    """verl's client, whose server handles record."""

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        server_id, server = await super()._acquire_server(request_id, **extra)
        spans = _SPANS.get()
        return server_id, server if spans is None else _RecordingServer(server, spans)


class SyncClient(_Recording):
    """Client of the synchronous trainer."""


class AsyncClient(_Recording, FullyAsyncLLMServerClient):  # type: ignore[misc]
    """Client of the asynchronous trainer: resumes replies that a weight update interrupted."""


class VerlEngine:
    """See the module.

    Args:
        client: verl's.
        timeout_s: deadline of one request, waiting for a weight update included.
        routed: the policy is a mixture of experts whose routing is wanted.
    """

    name = "verl's engine"

    def __init__(self, client: LLMServerClient, *, timeout_s: float, routed: bool) -> None:
        self._client = client
        self._routed = routed
        self._calls = Calls(self.name, timeout_s)

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
        prompt = np.asarray(prompt_ids, dtype=np.int32).tolist()
        work = self._sample(request_id, prompt, sampling, routed_from, sticky or request_id)
        sample = await self._calls.run(request_id, work)
        return aborted(routed_from) if sample is None else sample

    async def abort(self, request_id: str) -> None:
        """See `TokenEngine.abort`."""
        await self._calls.abort(request_id)

    async def close(self) -> None:
        """Stop what is in flight. The servers belong to verl."""
        await self._calls.close()

    async def _sample(
        self, request_id: str, prompt: list[int], sampling: Sampling, routed_from: int, sticky: str
    ) -> Sample:
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "logprobs": True,
            "routed_experts_prompt_start": routed_from,
        }
        spans: Spans = []
        _SPANS.set(spans)  # this coroutine is a task of its own, with a context of its own
        try:
            output = await self._client.generate(request_id=sticky, prompt_ids=prompt, sampling_params=params)
        except Exception as error:
            raise EngineError(
                f"{self.name} failed on request {request_id}: {type(error).__name__}: {error}"
            ) from error
        experts = output.routed_experts
        return assemble(
            self.name,
            prompt_tokens=len(prompt),
            sampling=sampling,
            token_ids=output.token_ids,
            logprobs=() if output.log_probs is None else output.log_probs,
            weight_version=np.repeat(
                np.array([version for _, version in spans], np.int32), [count for count, _ in spans]
            ),
            finish=_finish(output.stop_reason, len(output.token_ids), sampling.max_tokens),
            routed_experts=None if experts is None else np.asarray(experts),
            routed_from=routed_from,
            routed=self._routed,
        )


def _finish(reason: str | None, count: int, limit: int) -> str | None:
    """vLLM's word, from verl's."""
    if reason == "completed":
        return "length" if count >= limit else "stop"
    return "abort" if reason == "aborted" else reason

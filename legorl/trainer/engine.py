"""verl's rollout servers as a `TokenEngine`: token ids in, `Sample` out.

Invariant (I1): every token carries the policy version of the server that sampled it, also when a weight
update interrupted the reply and another version finished it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from legorl.engine.base import Finish, Sample, Sampling
from legorl.errors import EngineError


@dataclass
class _Call:
    """One `generate`: where it runs now, and which version sampled how many tokens."""

    request_id: str
    attempts: int = 0
    server: Any = None
    spans: list[tuple[int, int]] = field(default_factory=list)


_CALL: ContextVar[_Call | None] = ContextVar("legorl_call", default=None)


class _RecordingServer:
    """A rollout server's handle that notes (tokens, version) of each reply on the current call."""

    def __init__(self, server: Any, call: _Call) -> None:
        self._server, self._call = server, call
        self.generate = self

    async def remote(self, **kwargs: Any) -> Any:
        """`handle.generate.remote(...)`."""
        output = await self._server.generate.remote(**kwargs)
        version = output.extra_fields.get("global_steps")
        self._call.spans.append((len(output.token_ids), -1 if version is None else int(version)))
        return output


class _CallTracking(LLMServerClient):  # type: ignore[misc]
    """verl's client with its two overridable steps used to know the request's id and server."""

    def _vllm_request_id(self, request_id: str) -> str:
        call = _CALL.get()
        if call is None:
            return str(super()._vllm_request_id(request_id))
        call.attempts += 1
        return f"{call.request_id}-{call.attempts}"

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        server_id, server = await super()._acquire_server(request_id, **extra)
        call = _CALL.get()
        if call is None:
            return server_id, server
        call.server = server
        return server_id, _RecordingServer(server, call)


class SyncClient(_CallTracking):
    """Client of the synchronous trainer."""


class AsyncClient(_CallTracking, FullyAsyncLLMServerClient):  # type: ignore[misc]
    """Client of the asynchronous trainer: resumes replies that a weight update interrupted."""


class VerlEngine:
    """See the module."""

    def __init__(self, client: LLMServerClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._calls: dict[str, _Call] = {}

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
        prompt = [int(token) for token in prompt_ids]
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "logprobs": True,
            "routed_experts_prompt_start": routed_from,
        }
        call = _Call(request_id)
        self._calls[request_id] = call
        token = _CALL.set(call)
        try:
            output = await asyncio.wait_for(
                self._client.generate(
                    request_id=sticky or request_id, prompt_ids=prompt, sampling_params=params
                ),
                self._timeout_s,
            )
        except TimeoutError as error:
            await self.abort(request_id)
            raise EngineError(
                f"The engine did not answer request {request_id} within {self._timeout_s:g} s; "
                "raise engine.request_timeout_s or lower sandbox.concurrency."
            ) from error
        except asyncio.CancelledError:
            await self.abort(request_id)
            raise
        except Exception as error:
            raise EngineError(
                f"The engine failed on request {request_id}: {type(error).__name__}: {error}"
            ) from error
        finally:
            _CALL.reset(token)
            self._calls.pop(request_id, None)
        return _sample(output, call, sampling, routed_from)

    async def abort(self, request_id: str) -> None:
        """See `TokenEngine.abort`."""
        call = self._calls.get(request_id)
        if call is not None and call.server is not None:
            call.server.abort_request.remote(f"{call.request_id}-{call.attempts}", reset_prefix_cache=False)

    async def close(self) -> None:
        """The servers belong to verl."""


def _sample(output: Any, call: _Call, sampling: Sampling, routed_from: int) -> Sample:
    tokens = np.asarray(output.token_ids, dtype=np.int32)
    if output.log_probs is None or len(output.log_probs) != len(tokens):
        raise EngineError(f"The engine returned {len(tokens)} tokens without their log-probabilities.")
    versions = np.repeat(
        np.asarray([version for _, version in call.spans], dtype=np.int32), [count for count, _ in call.spans]
    )
    if len(versions) != len(tokens):
        raise EngineError(
            f"The engine returned {len(tokens)} tokens, {len(versions)} of them with a version."
        )
    finish = Finish.STOP
    if output.stop_reason in ("aborted", "abort"):
        finish = Finish.ABORT
    elif len(tokens) >= sampling.max_tokens or output.stop_reason == "length":
        finish = Finish.LENGTH
    experts = output.routed_experts
    if experts is not None:
        experts = np.asarray(experts)
        experts = experts.astype(np.uint8 if experts.max(initial=0) < 256 else np.uint16, copy=False)
    return Sample(
        token_ids=tokens,
        logprobs=np.asarray(output.log_probs, dtype=np.float32),
        weight_version=versions,
        finish=finish,
        routed_experts=experts,
        routed_start=routed_from,
    )

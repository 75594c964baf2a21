"""vLLM in this process (`AsyncLLM`) as a `TokenEngine`; its core is a child process.

Invariants: the weights are those of the directory it was started with, so every token has the version that
was given with it (I1); the core ends with this process, by whatever signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from legorl.engine.assemble import aborted, assemble
from legorl.engine.base import Sample, Sampling
from legorl.engine.calls import Calls
from legorl.errors import EngineDownError, EngineError

CORE_EXECUTOR = "legorl.engine.vllm_core.CoreExecutor"
SHUTDOWN_TIMEOUT_S = 10.0


class VllmEngine:
    """See the module. Made by `start`."""

    def __init__(
        self, llm: AsyncLLM, name: str, *, timeout_s: float, routed: bool, weight_version: int
    ) -> None:
        self.name = name
        self.llm = llm
        self._routed = routed
        self._weight_version = weight_version
        self._calls = Calls(name, timeout_s)

    @classmethod
    def start(
        cls,
        model_dir: Path,
        *,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        kv_cache_gb: float,
        timeout_s: float,
        routed: bool = False,
        weight_version: int = 0,
    ) -> Self:
        """Load the model and start the core. Blocks for tens of seconds, at most vLLM's own
        `VLLM_ENGINE_READY_TIMEOUT_S`; call it in the main thread, which the core must not outlive.

        Args:
            model_dir: Hugging Face directory.
            dtype: `float32`, `bfloat16`, ...
            max_model_len: context window.
            max_num_seqs: requests sampled at once.
            kv_cache_gb: memory of the key-value cache, GiB.
            timeout_s: deadline of one request, waiting included.
            routed: the policy is a mixture of experts whose routing is wanted.
            weight_version: of the weights in `model_dir`.

        Raises:
            EngineError: vLLM cannot serve this model here.
        """
        name = f"Engine vllm({model_dir.name})"
        arguments = AsyncEngineArgs(
            model=str(model_dir),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=int(kv_cache_gb * 2**30),
            enable_return_routed_experts=routed,
            logprobs_mode="processed_logprobs",
            distributed_executor_backend=CORE_EXECUTOR,
            enforce_eager=True,
        )
        try:
            llm = AsyncLLM.from_engine_args(arguments)
        except Exception as error:
            raise EngineError(f"{name} did not start: {error!r}. The lines above are its log.") from error
        return cls(llm, name, timeout_s=timeout_s, routed=routed, weight_version=weight_version)

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
        sample = await self._calls.run(request_id, self._sample(request_id, prompt, sampling, routed_from))
        return aborted(routed_from) if sample is None else sample

    async def abort(self, request_id: str) -> None:
        """See `TokenEngine.abort`."""
        await self._calls.abort(request_id)

    async def check(self) -> None:
        """Whether the core is alive.

        Raises:
            EngineDownError: it is not, and will not come back.
        """
        if self.llm.errored:
            raise EngineDownError(f"{self.name} is dead: its core process has ended; its log says why.")

    async def close(self) -> None:
        """Stop what is in flight, and the core."""
        await self._calls.close()
        self.llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)

    async def _sample(
        self, request_id: str, prompt: list[int], sampling: Sampling, routed_from: int
    ) -> Sample:
        await self.check()
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            routed_experts_prompt_start=routed_from,
        )
        output: Any = None
        try:
            # Left early, by a cancellation, the generator stops the request in the core.
            async for last in self.llm.generate(TokensPrompt(prompt_token_ids=prompt), params, request_id):
                output = last
        except EngineDeadError as error:
            raise EngineError(f"{self.name} died during request {request_id}; its log says why.") from error
        except Exception as error:  # what vLLM raises for a request it refuses is not one type
            raise EngineError(f"{self.name} failed on request {request_id}: {error!r}.") from error
        if output is None or not output.outputs:
            raise EngineError(f"{self.name} ended request {request_id} without an answer.")
        reply = output.outputs[0]
        return assemble(
            self.name,
            prompt_tokens=len(prompt),
            sampling=sampling,
            token_ids=reply.token_ids,
            logprobs=_logprobs(reply.logprobs),
            weight_version=np.full(len(reply.token_ids), self._weight_version, np.int32),
            finish=reply.finish_reason,
            routed_experts=reply.routed_experts,
            routed_from=routed_from,
            routed=self._routed,
        )


def _logprobs(flat: Any) -> NDArray[np.float32]:
    """Of the sampled tokens: in vLLM's flat lists they come first at every position."""
    return np.asarray(flat.logprobs, np.float32)[np.asarray(flat.start_indices, np.intp)]

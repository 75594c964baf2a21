"""verl's own rollout server around a real vLLM, without the training job that usually starts it.

Its `generate` is verl's, unchanged; only its start is ours.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from legorl.engine.vllm import VllmEngine
from tests.engine.vllm_server import running

VERSION = 4
"""Step of the weights."""


class _Config(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        """As verl's config objects have it."""
        return getattr(self, name, default)


class VerlServer(vLLMHttpServer):  # type: ignore[misc]
    """A Ray actor class."""

    lora_as_adapter = False

    def __init__(self, model_dir: str, context: int) -> None:
        self._ours = VllmEngine.start(
            Path(model_dir),
            dtype="float32",
            max_model_len=context,
            max_num_seqs=16,
            kv_cache_gb=0.5,
            timeout_s=60,
            routed=True,
        )
        self.engine = self._ours.llm
        self.config = _Config(
            max_model_len=context, full_determinism=False, enable_rollout_routing_replay=True, mtp=None
        )
        self.model_config = SimpleNamespace(processor=None)
        self.global_steps = VERSION
        self.replica_rank = self.node_rank = 0
        self._disaggregation_role, self._pd_decode_peers = "null", []
        self._submission_paused = self._rejecting = False
        self._admitting = 0
        self._resume_event = asyncio.Event()

    async def running_requests(self) -> int:
        """What vLLM's scheduler works on."""
        return await running(self._ours)

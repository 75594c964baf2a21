"""A server of ours that speaks vLLM's wire over real HTTP, and misbehaves on demand."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from aiohttp import web

LAYERS, CHOSEN = 3, 2


def npy(rows: Any, pickled: bool = False) -> str:
    """As vLLM sends arrays."""
    if pickled:
        return base64.b64encode(pickle.dumps(rows)).decode()
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return base64.b64encode(buffer.getvalue()).decode()


class FakeVllm:
    """Answers three tokens. `spoil` changes a good answer; `hang`, `status` and `raw` replace it."""

    def __init__(self) -> None:
        self.spoil: Callable[[dict[str, Any]], None] = lambda answer: None
        self.hang = False
        self.status = 200
        self.raw: bytes | None = None
        self.cut = False
        self.version: object = "default"
        self.versions: list[object] = []
        """Played before `version`, one per request."""
        self.dtype = np.uint8
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.running = 0
        self.port = 0

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body["sampling_params"]
        ids = [1, 2, 3][: params["max_tokens"]]
        total = len(body["token_ids"]) + len(ids) - 1 - params["routed_experts_prompt_start"]
        shared = np.log(1 / params["top_k"]) if params["top_k"] > 0 else -0.25
        content = [{"token": f"token_id:{token}", "logprob": shared} for token in ids]
        rows = np.arange(total * LAYERS * CHOSEN).reshape(total, LAYERS, CHOSEN).astype(self.dtype)
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": "length" if len(ids) == params["max_tokens"] else "stop",
            "routed_experts": npy(rows),
        }
        answer = {"request_id": body["request_id"], "choices": [choice]}
        self.spoil(answer)
        return answer

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        if request.path == "/weight_info" and self.status == 200:
            version = self.versions.pop(0) if self.versions else self.version
            return web.json_response({"weight_version": version})
        if request.method == "POST":
            self.asked.append(await request.json())
        self.running += 1
        try:
            if self.hang:
                await asyncio.sleep(60)
            if self.cut:
                assert request.transport is not None
                request.transport.abort()
            if self.raw is not None or self.status != 200:
                return web.Response(status=self.status, body=b"no" if self.raw is None else self.raw)
            if request.path == "/health":
                return web.Response()
            return web.json_response(self.answer(self.asked[-1]))
        finally:
            self.running -= 1

    async def start(self) -> Self:
        """Listen; again on the same port after `stop`."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self) -> None:
        """Break all connections and take no more."""
        await self._runner.cleanup()

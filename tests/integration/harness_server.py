"""A scripted model server for harness tests: plays fixed replies over both wires, streaming or not.

It is a `ProxyEndpoint`: a sandbox hands it the listening socket of its own network namespace.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass(frozen=True)
class Call:
    """A scripted reply that calls one tool. `arguments` is sent as it is, so it can be malformed."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Refusal:
    """A scripted HTTP error."""

    status: int
    code: str
    message: str


Turn = Call | Refusal | str


@dataclass(frozen=True)
class Seen:
    """One request as the server saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class ScriptedServer:
    """Plays `turns` in order for requests that carry tools; requests without tools get a fixed text."""

    turns: list[Turn]
    seen: list[Seen] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first request."""
    _played: int = 0
    _servers: dict[int, tuple[uvicorn.Server, asyncio.Task[None]]] = field(default_factory=dict)

    async def attach(self, sock: socket.socket) -> None:
        """Serve on a listening socket."""
        routes = [
            Route("/t/{trial}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/t/{trial}/v1/messages", self._messages, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off", http="h11")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        task = asyncio.create_task(server._serve(sockets=[sock]))
        self._servers[sock.fileno()] = (server, task)

    async def detach(self, sock: socket.socket) -> None:
        """Stop serving on it and close it."""
        server, task = self._servers.pop(sock.fileno())
        server.should_exit = server.force_exit = True
        await asyncio.wait_for(task, 10)
        sock.close()

    @property
    def main(self) -> list[Seen]:
        """The requests that carried tools."""
        return [seen for seen in self.seen if seen.body.get("tools")]

    async def _next(self, request: Request) -> tuple[Turn, dict[str, Any], str]:
        body = await request.json()
        self.seen.append(Seen(request.url.path, dict(request.headers), body))
        self.asked.set()
        if not body.get("tools"):
            return "A title", body, f"side_{len(self.seen):04d}"
        turn = self.turns[self._played] if self._played < len(self.turns) else "Done."
        self._played += 1
        return turn, body, f"call_{self._played:04d}"

    async def _chat(self, request: Request) -> Response:
        turn, body, call_id = await self._next(request)
        if isinstance(turn, Refusal):
            error = {"message": turn.message, "type": "invalid_request_error", "code": turn.code}
            return JSONResponse({"error": error}, turn.status)
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        head = {"id": f"chatcmpl-{call_id}", "created": 1, "model": body["model"]}
        message: dict[str, Any] = {"role": "assistant", "content": turn if isinstance(turn, str) else None}
        finish = "stop"
        if isinstance(turn, Call):
            function = {"name": turn.name, "arguments": turn.arguments}
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            finish = "tool_calls"
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})

        async def events() -> AsyncIterator[str]:
            chunk = {**head, "object": "chat.completion.chunk"}
            delta = {k: v for k, v in message.items() if v is not None}
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": 0, **delta["tool_calls"][0]}]
            choices = [{"index": 0, "delta": delta, "finish_reason": None}]
            yield f"data: {json.dumps({**chunk, 'choices': choices})}\n\n"
            choices = [{"index": 0, "delta": {}, "finish_reason": finish}]
            yield f"data: {json.dumps({**chunk, 'choices': choices, 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _messages(self, request: Request) -> Response:
        turn, body, call_id = await self._next(request)
        if isinstance(turn, Refusal):
            error = {"type": turn.code, "message": turn.message}
            return JSONResponse({"type": "error", "error": error}, turn.status)
        usage = {"input_tokens": 100, "output_tokens": 10}
        stop = "end_turn"
        start: dict[str, Any] = {"type": "text", "text": ""}
        delta: dict[str, Any] = {"type": "text_delta", "text": turn}
        if isinstance(turn, Call):
            stop = "tool_use"
            start = {
                "type": "tool_use",
                "id": call_id.replace("call", "toolu"),
                "name": turn.name,
                "input": {},
            }
            delta = {"type": "input_json_delta", "partial_json": turn.arguments}
        message = {
            "id": f"msg_{call_id}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": [],
        }
        message |= {"stop_reason": None, "stop_sequence": None, "usage": usage}

        async def events() -> AsyncIterator[str]:
            for event in (
                {"type": "message_start", "message": message},
                {"type": "content_block_start", "index": 0, "content_block": start},
                {"type": "content_block_delta", "index": 0, "delta": delta},
                {"type": "content_block_stop", "index": 0},
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": stop, "stop_sequence": None},
                    "usage": usage,
                },
                {"type": "message_stop"},
            ):
                yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

"""A scripted model server for tests of mini-swe-agent: plays fixed replies as chat completions.

It is a `ProxyEndpoint`: a sandbox hands it the listening socket of its own network namespace.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


@dataclass(frozen=True)
class Call:
    """A scripted reply that calls one tool. `arguments` is sent as it is, so it can be malformed."""

    name: str
    arguments: str


Turn = Call | str


@dataclass(frozen=True)
class Seen:
    """One request as the server saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class ScriptedServer:
    """Plays `turns` in order."""

    turns: list[Turn]
    seen: list[Seen] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first request."""
    _played: int = 0
    _servers: dict[int, tuple[uvicorn.Server, asyncio.Task[None]]] = field(default_factory=dict)

    async def attach(self, sock: socket.socket) -> None:
        """Serve on a listening socket."""
        routes = [Route("/t/{trial}/v1/chat/completions", self._chat, methods=["POST"])]
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

    async def _next(self, request: Request) -> tuple[Turn, dict[str, Any], str]:
        body = await request.json()
        self.seen.append(Seen(request.url.path, dict(request.headers), body))
        self.asked.set()
        turn = self.turns[self._played] if self._played < len(self.turns) else "Done."
        self._played += 1
        return turn, body, f"call_{self._played:04d}"

    async def _chat(self, request: Request) -> Response:
        turn, body, call_id = await self._next(request)
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        head = {"id": f"chatcmpl-{call_id}", "created": 1, "model": body["model"]}
        message: dict[str, Any] = {"role": "assistant", "content": turn if isinstance(turn, str) else None}
        finish = "stop"
        if isinstance(turn, Call):
            function = {"name": turn.name, "arguments": turn.arguments}
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            finish = "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})

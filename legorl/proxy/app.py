"""The HTTP side of the proxy: an ASGI application with one prefix and one token per trial.

    POST /t/{trial}/v1/chat/completions    POST /t/{trial}/v1/messages
    GET  /t/{trial}/v1/models              POST /t/{trial}/v1/messages/count_tokens

Invariants: nothing is answered without a trial's token, unknown paths included; opening, closing and reading
a trial are methods of `Proxy` and have no route. Errors come in the shape of the wire that was addressed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from legorl.errors import ProxyError
from legorl.proxy.messages import Json
from legorl.proxy.refusal import Reason, Refusal, invalid
from legorl.proxy.session import Session
from legorl.proxy.wire import WireFormat, compact
from legorl.proxy.wire_anthropic import Anthropic
from legorl.proxy.wire_openai_chat import OpenAIChat

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Headers = Mapping[str, str]

BODY_LIMIT = 32 << 20
DRAIN_LIMIT = 4 * BODY_LIMIT
HEARTBEAT_S = 10.0
"""Silence on a stream before something is sent; clients give up after 120 s, middle boxes after less."""

_PATH = re.compile(r"/t/([^/]+)/v1/(.+?)/?")
_OPENAI = OpenAIChat()
_ANTHROPIC = Anthropic()
_log = logging.getLogger(__name__)


class App:
    """The ASGI application over the sessions of a proxy."""

    def __init__(self, sessions: Mapping[str, Session], heartbeat_s: float = HEARTBEAT_S) -> None:
        self._sessions = sessions
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http":
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        match = _PATH.fullmatch(scope["path"])
        endpoint = match[2] if match else ""
        anthropic = endpoint.startswith("messages") or "anthropic-version" in headers
        wire: WireFormat = _ANTHROPIC if anthropic else _OPENAI
        answer = _Answer(send)
        session: Session | None = None
        try:
            session = self._authenticate(match[1] if match else "", headers)
            method, handler = self._route(endpoint)
            if scope["method"] != method:
                raise Refusal(Reason.METHOD, f"{scope['method']} is not allowed here, only {method} is")
            await handler(session, wire, headers, receive, answer)
        except Refusal as refusal:
            await answer.error(wire, refusal)
        except RecursionError:
            await answer.error(wire, invalid("the body is nested too deeply"))
        except Exception as error:  # a bug of ours: it must exclude the trial, and the harness gets its 500
            if session is not None:
                session.fail(ProxyError(f"Trial {session.trial}: {endpoint}: {error!r}"))
            _log.exception("request failed")
            await answer.error(wire, Refusal(Reason.BROKEN, "the proxy failed"))

    def _authenticate(self, trial: str, headers: Headers) -> Session:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        tokens = [token.encode("latin-1") for token in given if token]
        session = self._sessions.get(trial)
        if session is not None and any(
            secrets.compare_digest(session.token.encode(), token) for token in tokens
        ):
            return session
        if any(other.token.encode() in tokens for other in self._sessions.values()):
            raise Refusal(Reason.FORBIDDEN, "this token is not for this address")
        raise Refusal(Reason.UNAUTHENTICATED, "missing or invalid token")

    def _route(self, endpoint: str) -> tuple[str, Callable[..., Awaitable[None]]]:
        match endpoint:
            case "chat/completions" | "messages":
                return "POST", self._complete
            case "messages/count_tokens":
                return "POST", self._count_tokens
            case "models":
                return "GET", self._models
        raise Refusal(Reason.NOT_FOUND, f"/v1/{endpoint} does not exist")

    async def _models(
        self, session: Session, wire: WireFormat, headers: Headers, receive: Receive, answer: _Answer
    ) -> None:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "legorl"}
        model |= {"type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}
        page = {"has_more": False, "first_id": "policy", "last_id": "policy"}
        await answer.json(200, {"object": "list", "data": [model], **page})

    async def _count_tokens(
        self, session: Session, wire: WireFormat, headers: Headers, receive: Receive, answer: _Answer
    ) -> None:
        body = session.bodies.read(await _read_body(receive))
        count = session.count_tokens(wire.parse(body), session.speaker(headers, body))
        await answer.json(200, {"input_tokens": count})

    async def _complete(
        self, session: Session, wire: WireFormat, headers: Headers, receive: Receive, answer: _Answer
    ) -> None:
        body = session.bodies.read(await _read_body(receive))
        request = wire.parse(body)
        speaker = session.speaker(headers, body)
        sampling = asyncio.create_task(session.complete(request, speaker, wire.call_id_prefix))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            while not sampling.done():
                silence = self._heartbeat_s if request.stream else None
                await asyncio.wait({sampling, gone}, timeout=silence, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not sampling.done():
                    await answer.stream(wire.heartbeat)
            turn, reply = await sampling
            # Once the last byte is out the server reports the client as gone: look before.
            turn.delivered = turn.delivered or not gone.done()
            if request.stream:
                await answer.stream(b"".join(wire.events(reply, request)))
                await answer.end()
            else:
                await answer.json(200, wire.reply(reply, request))
        finally:
            for task in (sampling, gone):
                task.cancel()
            await asyncio.gather(sampling, gone, return_exceptions=True)


class _Answer:
    """One HTTP response: a JSON document or a stream of events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streaming = False

    async def json(self, status: int, value: Json, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        data = compact(value)
        length = (b"content-length", str(len(data)).encode())
        await self._start(status, [(b"content-type", b"application/json"), length, *headers])
        await self._body(data, more=False)

    async def stream(self, data: bytes) -> None:
        if not self._streaming:
            kind = (b"content-type", b"text/event-stream; charset=utf-8")
            await self._start(200, [kind, (b"cache-control", b"no-cache")])
            self._streaming = True
        await self._body(data, more=True)

    async def end(self) -> None:
        await self._body(b"", more=False)

    async def error(self, wire: WireFormat, refusal: Refusal) -> None:
        if self._streaming:
            await self._body(wire.error_event(refusal), more=False)
            return
        headers = [(b"x-should-retry", b"false")]  # both official clients obey it
        if refusal.reason is Reason.TOO_LARGE:
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        await self.json(refusal.reason.status, wire.error(refusal), headers)

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(receive: Receive) -> bytes:
    chunks, size, more = [], 0, True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise invalid("the body ended early")
        chunk, more = event.get("body", b""), event.get("more_body", False)
        size += len(chunk)
        if size <= BODY_LIMIT:
            chunks.append(chunk)
        elif size > DRAIN_LIMIT:
            break
        else:
            chunks.clear()  # read on and forget: a client that is still sending does not see an answer
    if size > BODY_LIMIT:
        raise Refusal(Reason.TOO_LARGE, f"the body is larger than {BODY_LIMIT} bytes")
    return b"".join(chunks)

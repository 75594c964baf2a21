"""The HTTP side of the proxy: an ASGI application with one prefix and one token per trial.

    POST /t/{trial}/v1/messages            POST /t/{trial}/v1/messages/count_tokens
    POST /t/{trial}/v1/chat/completions
    POST /t/{trial}/v1/responses           POST /t/{trial}/v1/responses/input_tokens
    GET  /t/{trial}/v1/models

Invariants: nothing is answered without a trial's token, unknown paths included; opening, closing and reading
a trial are methods of `Proxy` and have no route. Errors come in the shape of the wire that was addressed.

A client hears something every `heartbeat_s`, also one that does not stream: white space goes out before the
JSON. With the first byte the status is spent. An error behind it ends a stream with the protocol's error
event; a JSON answer is cut off instead, which no client can take for a reply: it sees a broken connection,
asks again, and is told the error then, since only an engine, a proxy or a trial that has ended for good
fails so late.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from legorl.errors import ProxyError
from legorl.proxy.messages import ChatRequest, Json, Reply
from legorl.proxy.refusal import Reason, Refusal, invalid
from legorl.proxy.session import Session
from legorl.proxy.sessions import Sessions
from legorl.proxy.wire import WireFormat, compact
from legorl.proxy.wire_anthropic import Anthropic
from legorl.proxy.wire_openai_chat import OpenAIChat
from legorl.proxy.wire_openai_responses import OpenAIResponses

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Headers = Mapping[str, str]

BODY_LIMIT = 32 << 20
DRAIN_LIMIT = 4 * BODY_LIMIT
HEARTBEAT_S = 10.0
"""Silence before something is sent; clients give up after 120 s, middle boxes after less."""
BODY_TIMEOUT_S = 60.0
"""For a request's body to arrive."""
HEADER_LIMIT = 200

_PATH = re.compile(r"/t/([^/]+)/v1/(.+?)/?")
_ANTHROPIC = Anthropic()
_CHAT = OpenAIChat()
_RESPONSES = OpenAIResponses()
_JSON = ((b"content-type", b"application/json"),)
_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_log = logging.getLogger(__name__)


class App:
    """The ASGI application over the sessions of a proxy."""

    def __init__(self, sessions: Sessions, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._sessions = sessions
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http":
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        match = _PATH.fullmatch(scope["path"])
        endpoint = match[2] if match else ""
        answer = _Answer(_wire_of(endpoint, headers), send)
        session: Session | None = None
        try:
            if len(scope["headers"]) > HEADER_LIMIT:
                raise Refusal(Reason.HEADERS, f"more than {HEADER_LIMIT} headers")
            session = self._sessions.authenticate(match[1] if match else "", _tokens(headers))
            method, handler = self._route(endpoint)
            if scope["method"] != method:
                raise Refusal(Reason.METHOD, f"{scope['method']} is not allowed here, only {method} is")
            await handler(session, headers, receive, answer)
        except Refusal as refusal:
            await answer.error(refusal)
        except RecursionError:
            await answer.error(invalid("the body is nested too deeply"))
        except Exception as error:  # a bug of ours: it must exclude the trial, and the harness gets its 500
            if session is not None:
                session.fail(ProxyError(f"Trial {session.trial}: {endpoint}: {error!r}"))
            _log.exception("request failed")
            await answer.error(Refusal(Reason.BROKEN, "the proxy failed"))

    def _route(self, endpoint: str) -> tuple[str, Handler]:
        match endpoint:
            case "messages" | "chat/completions" | "responses":
                return "POST", self._complete
            case "messages/count_tokens" | "responses/input_tokens":
                return "POST", self._count_tokens
            case "models":
                return "GET", self._models
        raise Refusal(Reason.NOT_FOUND, f"/v1/{endpoint} does not exist")

    async def _models(self, session: Session, headers: Headers, receive: Receive, answer: _Answer) -> None:
        await answer.json(200, answer.wire.models())

    async def _count_tokens(
        self, session: Session, headers: Headers, receive: Receive, answer: _Answer
    ) -> None:
        body = session.bodies.read(await _read_body(session, headers, receive))
        count = session.count_tokens(answer.wire.parse(body), session.speaker(headers, body))
        await answer.json(200, answer.wire.token_count(count))

    async def _complete(self, session: Session, headers: Headers, receive: Receive, answer: _Answer) -> None:
        body = session.bodies.read(await _read_body(session, headers, receive))
        request = answer.request = answer.wire.parse(body)
        speaker = session.speaker(headers, body)
        sampling = asyncio.create_task(session.complete(request, speaker, answer.wire.call_id_prefix))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            while not sampling.done():
                await asyncio.wait(
                    {sampling, gone}, timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED
                )
                if gone.done():
                    return
                if not sampling.done():
                    await answer.heartbeat(request)
            turn, reply = await sampling
            # Once the last byte is out the server reports the client as gone: look before.
            turn.delivered = turn.delivered or not gone.done()
            await answer.reply(reply, request)
        finally:
            for task in (sampling, gone):
                task.cancel()
            await asyncio.gather(sampling, gone, return_exceptions=True)


Handler = Callable[[Session, Headers, Receive, "_Answer"], Awaitable[None]]


class _Answer:
    """One HTTP response: a JSON document or a stream of events."""

    def __init__(self, wire: WireFormat, send: Send) -> None:
        self.wire = wire
        self.request: ChatRequest | None = None
        """Of a completion, once it is understood."""
        self._send = send
        self._beats = 0

    async def heartbeat(self, request: ChatRequest) -> None:
        """Keep the client waiting."""
        if not self._beats:
            await self._start(200, _STREAM if request.stream else _JSON)
        await self._body(self.wire.heartbeat(request, self._beats) if request.stream else b" ", more=True)
        self._beats += 1

    async def reply(self, reply: Reply, request: ChatRequest) -> None:
        """Answer a completion."""
        if request.stream:
            await self._stream(b"".join(self.wire.events(reply, request, self._beats)))
        elif self._beats:
            await self._body(compact(self.wire.reply(reply, request)), more=False)
        else:
            await self.json(200, self.wire.reply(reply, request))

    async def error(self, refusal: Refusal) -> None:
        """Say why there is no answer."""
        request, beats = self.request, self._beats
        if request is not None and request.stream and (beats or self.wire.refuses_in_stream(refusal.reason)):
            await self._stream(self.wire.error_event(refusal, request, beats))
        elif not beats:  # behind a beat the answer stays unfinished, and the server cuts the connection
            again = b"true" if refusal.reason is Reason.BUSY else b"false"
            headers = [(b"x-should-retry", again)]  # both official clients obey it
            if refusal.reason in (Reason.TOO_LARGE, Reason.TIMEOUT):
                headers.append((b"connection", b"close"))  # the rest of the body is not read
            await self.json(refusal.reason.status, self.wire.error(refusal), headers)

    async def json(self, status: int, value: Json, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Answer with a document."""
        data = compact(value)
        await self._start(status, [*_JSON, (b"content-length", str(len(data)).encode()), *headers])
        await self._body(data, more=False)

    async def _stream(self, data: bytes) -> None:
        if not self._beats:
            await self._start(200, _STREAM)
        await self._body(data, more=False)

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _wire_of(endpoint: str, headers: Headers) -> WireFormat:
    if endpoint.startswith("messages") or "anthropic-version" in headers:
        return _ANTHROPIC
    return _RESPONSES if endpoint.startswith("responses") else _CHAT


def _tokens(headers: Headers) -> list[str]:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
    return [token for token in given if token]


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(session: Session, headers: Headers, receive: Receive) -> bytes:
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise Refusal(Reason.ENCODING, f"content-encoding: {encoding!r} is not supported, send plain JSON")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S), session.receiving:
            return await _read_whole(receive)
    except TimeoutError:
        raise Refusal(Reason.TIMEOUT, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None


async def _read_whole(receive: Receive) -> bytes:
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

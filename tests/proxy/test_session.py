"""Budgets, joining, disconnects, closing and failures, over real connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping

import httpx
import pytest

from legorl.engine.base import Finish, Sample
from legorl.errors import EngineError, ProxyError
from legorl.proxy import invariants
from tests.proxy.conftest import Stage

ASK = {"model": "any", "messages": [{"role": "user", "content": "Hello?"}]}


async def post(stage: Stage, token: str, body: object = ASK, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=10) as client:
        return await client.post(
            stage.url() + "/v1/chat/completions",
            content=body if isinstance(body, bytes) else json.dumps(body),
            headers={"authorization": f"Bearer {token}", **headers},
        )


async def until(condition: Callable[[], object]) -> None:
    """Wait, at most five seconds."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.005)


async def test_turn_limit(stage: Stage) -> None:
    session = stage.open(turn_limit=1)
    assert (await post(stage, session.token)).status_code == 200
    assert session.mark is None
    title = await post(stage, session.token, **{"x-thread": "title"})
    assert title.status_code == 200  # only the main thread counts
    refused = await post(stage, session.token, {**ASK, "messages": [*ASK["messages"], *ASK["messages"]]})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.headers["x-should-retry"] == "false"
    assert session.mark == "turn_limit"
    assert session.ended.is_set()


async def test_token_limit_cuts_the_last_reply_and_marks(stage: Stage) -> None:
    stage.script = ["one two three four five six seven eight nine ten"]
    session = stage.open(trial_tokens=5)
    reply = (await post(stage, session.token)).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 5
    assert session.mark == "token_limit"
    assert (await post(stage, session.token)).json()["error"]["code"] == "context_length_exceeded"


async def test_a_reply_that_fills_the_context_marks(stage: Stage) -> None:
    stage.script = ["x " * 3000]
    session = stage.open(max_tokens=8000)
    reply = (await post(stage, session.token)).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 4096
    assert session.mark == "context_overflow"


async def test_a_reply_cut_at_its_own_limit_is_no_mark(stage: Stage) -> None:
    stage.script = ["one two three four five six"]
    session = stage.open(max_tokens=3)
    assert (await post(stage, session.token)).json()["choices"][0]["finish_reason"] == "length"
    assert session.mark is None


async def test_wishes_are_recorded_and_not_followed(stage: Stage) -> None:
    session = stage.open()
    assert (await post(stage, session.token, {**ASK, "temperature": 0, "max_tokens": 1})).status_code == 200
    ledger = await stage.proxy.close("a")
    assert ledger.wishes == {"temperature": [0], "max_tokens": [1]}
    assert ledger.turns[0].finish is Finish.STOP


async def test_the_same_request_in_flight_is_answered_once(stage: Stage) -> None:
    gate = asyncio.Event()
    stage.hold = gate.wait
    session = stage.open()
    first, second = (asyncio.create_task(post(stage, session.token)) for _ in range(2))
    await until(lambda: len(stage.engine.running) == 1)
    await asyncio.sleep(0.1)
    assert len(stage.engine.running) == 1
    gate.set()
    one, two = (await first).json(), (await second).json()
    assert one["id"] == two["id"]
    ledger = await stage.proxy.close("a")
    assert len(ledger.turns) == 1
    assert invariants.check(ledger) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_aborts_the_engine_request(stage: Stage, stream: bool) -> None:
    stage.hold = asyncio.Event().wait
    session = stage.open()
    task = asyncio.create_task(post(stage, session.token, {**ASK, "stream": stream}))
    await until(lambda: stage.engine.running)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not stage.engine.running)
    stage.hold = None
    assert (await post(stage, session.token)).status_code == 200
    ledger = await stage.proxy.close("a")
    assert [turn.kind for turn in ledger.turns] == ["open"]
    assert session.turns == 1
    assert session.failure is None


async def test_one_of_two_waiting_clients_may_leave(stage: Stage) -> None:
    gate = asyncio.Event()
    stage.hold = gate.wait
    session = stage.open()
    leaving, staying = (asyncio.create_task(post(stage, session.token)) for _ in range(2))
    await until(lambda: stage.engine.running)
    await asyncio.sleep(0.1)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await asyncio.sleep(0.1)
    gate.set()
    assert (await staying).status_code == 200


async def test_closing_aborts_what_is_in_flight(stage: Stage) -> None:
    stage.hold = asyncio.Event().wait
    session = stage.open()
    task = asyncio.create_task(post(stage, session.token))
    await until(lambda: stage.engine.running)
    ledger = await stage.proxy.close("a")
    assert not stage.engine.running
    assert (await task).status_code == 500
    assert ledger.turns == []
    assert ledger.segments == []
    assert (await post(stage, session.token)).status_code == 401
    with pytest.raises(ProxyError, match="not open"):
        await stage.proxy.close("a")


async def test_heartbeats_keep_a_stream_alive(stage: Stage) -> None:
    async def slow() -> None:
        await asyncio.sleep(0.7)

    stage.hold = slow
    session = stage.open()
    reply = await post(stage, session.token, {**ASK, "stream": True})
    assert reply.text.count(": ping") >= 2
    assert reply.text.endswith("data: [DONE]\n\n")
    async with httpx.AsyncClient() as client:
        reply = await client.post(
            stage.url() + "/v1/messages",
            json={**ASK, "stream": True, "max_tokens": 9},
            headers={"x-api-key": session.token},
        )
    assert reply.text.count("event: ping") >= 2
    assert "event: message_stop" in reply.text


class Broken:
    """An engine that fails."""

    async def generate(self, *args: object, **kwargs: object) -> Sample:
        await asyncio.sleep(0.3)
        raise EngineError("worker 3 died")

    async def abort(self, request_id: str) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_is_infrastructure_and_says_nothing_of_itself(stage: Stage, stream: bool) -> None:
    from legorl.proxy.proxy import Proxy
    from tests.proxy.models import HermesLike

    proxy = Proxy(Broken(), stage.renderer, HermesLike(), context_tokens=4096, heartbeat_s=0.1)
    sock = socket.create_server(("127.0.0.1", 0))
    stage.port = sock.getsockname()[1]
    await proxy.attach(sock)
    old, stage.proxy = stage.proxy, proxy
    try:
        session = stage.open()
        if not stream:  # a document that had begun with a heartbeat is cut off; who asks again is told
            with pytest.raises(httpx.RemoteProtocolError):
                await post(stage, session.token, ASK)
        reply = await post(stage, session.token, {**ASK, "stream": stream})
        assert reply.status_code == (200 if stream else 500)  # the stream had begun with a heartbeat
        assert "server_error" in reply.text
        assert "worker" not in reply.text
        assert isinstance(session.failure, EngineError)
        assert session.ended.is_set()
        ledger = await proxy.close("a")
        assert ledger.segments == []
    finally:
        stage.proxy = old
        await proxy.aclose()


async def test_detach_ends_connections_and_closes_the_socket(stage: Stage) -> None:
    stage.hold = asyncio.Event().wait
    session = stage.open()
    sock = socket.create_server(("127.0.0.1", 0))
    stage.port = sock.getsockname()[1]
    await stage.proxy.attach(sock)
    task = asyncio.create_task(post(stage, session.token))
    await until(lambda: stage.engine.running)
    async with asyncio.timeout(5):
        await stage.proxy.detach(sock)
    with pytest.raises(httpx.HTTPError):
        await task
    await until(lambda: not stage.engine.running)
    assert sock.fileno() == -1
    with pytest.raises(httpx.ConnectError):
        await post(stage, session.token)


HOSTILE: Mapping[str, bytes] = {
    "empty": b"",
    "not json": b"{",
    "not an object": b"[1]",
    "invalid utf-8": b'{"messages": "\xff\xfe"}',
    "raw surrogate": b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep enough to pass the parser": b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": '
    b'"function", "function": {"name": "t", "parameters": {"a": ' + b"[" * 960 + b"]" * 960 + b"}}}]}",
    "huge integer": b'{"messages": [{"role": "user", "content": "x"}], "n": ' + b"9" * 10_000 + b"}",
    "messages a string": b'{"messages": "x"}',
    "message a number": b'{"messages": [1]}',
    "role a list": b'{"messages": [{"role": [], "content": "x"}]}',
    "role unknown": b'{"messages": [{"role": "root", "content": "x"}]}',
    "content a number": b'{"messages": [{"role": "user", "content": 5}]}',
    "block unknown": b'{"messages": [{"role": "user", "content": [{"type": "exploit"}]}]}',
    "block type a list": b'{"messages": [{"role": "user", "content": [{"type": []}]}]}',
    "tools an object": b'{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}',
    "tool without a name": b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {}}]}',
    "call without an id": b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}',
    "stream a string": b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
    "several choices": b'{"messages": [{"role": "user", "content": "x"}], "n": 3}',
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_bodies_are_refused_and_harm_nothing(stage: Stage, name: str) -> None:
    session = stage.open()
    refused = await post(stage, session.token, HOSTILE[name])
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert session.failure is None
    assert (await post(stage, session.token)).status_code == 200
    ledger = await stage.proxy.close("a")
    assert len(ledger.turns) == 1
    assert invariants.check(ledger) == []


async def test_a_lone_surrogate_is_replaced(stage: Stage) -> None:
    session = stage.open()
    body = b'{"messages": [{"role": "user", "content": "a\\ud83db"}]}'
    assert (await post(stage, session.token, body)).status_code == 200
    assert "a\ufffdb" in stage.prompts[0]


async def test_a_huge_body_is_413_with_and_without_its_length(stage: Stage) -> None:
    session = stage.open()
    reply = await post(stage, session.token, b" " * (33 << 20))
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"

    async def chunks() -> object:
        for _ in range(34):
            yield b" " * (1 << 20)

    async with httpx.AsyncClient(timeout=20) as client:
        reply = await client.post(
            stage.url() + "/v1/messages", content=chunks(), headers={"x-api-key": session.token}
        )
    assert reply.status_code == 413
    assert reply.json()["error"]["type"] == "request_too_large"


@pytest.mark.parametrize("path", ["/", "/t/a", "/t/a/v1/nothing", "/t/unknown/v1/models", "/v1/models"])
async def test_nothing_is_answered_without_a_token(stage: Stage, path: str) -> None:
    session = stage.open()
    base = f"http://127.0.0.1:{stage.port}"
    async with httpx.AsyncClient() as client:
        assert (await client.get(base + path)).status_code == 401
        assert (await client.get(base + path, headers={"x-api-key": "wrong"})).status_code == 401
        known = await client.get(base + path, headers={"x-api-key": session.token})
    assert known.status_code == (404 if path == "/t/a/v1/nothing" else 403)


async def test_a_wrong_method_is_405(stage: Stage) -> None:
    session = stage.open()
    async with httpx.AsyncClient() as client:
        reply = await client.get(stage.url() + "/v1/messages", headers={"x-api-key": session.token})
    assert reply.status_code == 405
    assert reply.json()["type"] == "error"

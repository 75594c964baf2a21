"""A trial's token opens its own address and nothing else, and a trial cannot learn that another exists."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest

from legorl.proxy import listener
from legorl.proxy.proxy import Proxy
from tests.proxy.conftest import Stage
from tests.proxy.test_session import ASK

PATHS = ["", "/v1", *(f"/v1/{name}" for name in ("models", "messages", "responses", "chat/completions", "x"))]


async def get(stage: Stage, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=10, verify=False) as client:
        return await client.request(method, f"http://127.0.0.1:{stage.port}{path}", headers=headers)


def seen(reply: httpx.Response) -> tuple[object, ...]:
    """Everything a client can see."""
    return reply.status_code, sorted(reply.headers.items()), reply.content


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"])
async def test_there_is_no_anonymous_route(stage: Stage, method: str) -> None:
    stage.open()
    for path in ("/", "/t", "/v1/models", "/metrics", "/docs", "/openapi.json", "/t/a/v1/models"):
        for credentials in ({}, {"authorization": "Bearer"}, {"authorization": "Basic YTpi"}):
            assert (await get(stage, path, method, **credentials)).status_code == 401


@pytest.mark.parametrize("path", PATHS)
async def test_another_trial_and_none_look_the_same(stage: Stage, path: str) -> None:
    mine, _ = stage.open("a"), stage.open("b")
    for method in ("GET", "POST"):
        for key in (mine.token, "wrong", ""):
            there = await get(stage, f"/t/b{path}", method, **({"x-api-key": key} if key else {}))
            nowhere = await get(stage, f"/t/c{path}", method, **({"x-api-key": key} if key else {}))
            assert seen(there) == seen(nowhere)
            assert there.status_code == (403 if key == mine.token else 401)


@pytest.mark.parametrize("place", ["x-api-key", "authorization"])
async def test_every_place_of_a_token(stage: Stage, place: str) -> None:
    mine, other = stage.open("a"), stage.open("b")
    for token, status in ((mine.token, 200), (other.token, 403), (mine.token[:-1], 401), ("\xff", 401)):
        value = token if place == "x-api-key" else f"Bearer {token}"
        async with httpx.AsyncClient(verify=False) as client:
            headers = {place: value.encode("latin-1")}
            reply = await client.get(stage.url("a") + "/v1/models", headers=headers)
        assert reply.status_code == status
        assert other.token not in reply.text
        assert mine.token not in reply.text


async def test_answers_say_nothing_of_other_trials(stage: Stage) -> None:
    """The same questions get the same answers, alone and among others."""
    answers = []
    for others in (0, 3):
        session = stage.open("a")
        names = [f"other{index}" for index in range(others)]
        for name in names:
            stage.open(name)
        own = {"x-api-key": session.token}
        answers.append(
            [
                seen(await get(stage, path, method, **own))
                for path in ("/t/a/v1/models", "/t/a/v1/nothing", "/t/a", "/t/other0/v1/models")
                for method in ("GET", "POST")
            ]
        )
        for name in ("a", *names):
            await stage.proxy.close(name)
    assert answers[0] == answers[1]


async def test_the_control_side_has_no_route(stage: Stage) -> None:
    session = stage.open()
    control = [name for name in vars(Proxy) if not name.startswith("_")]
    assert {"open", "close", "attach", "detach"} <= set(control)
    for name in (*control, "ledger", "sessions", "shutdown", "admin"):
        for path in (f"/{name}", f"/t/a/{name}", f"/t/a/v1/{name}"):
            for method in ("GET", "POST", "DELETE"):
                reply = await get(stage, path, method, **{"x-api-key": session.token})
                assert reply.status_code == (404 if path.startswith("/t/a/v1") else 403)
    assert session.trial in list(stage.proxy._sessions)


async def test_a_request_that_ends_after_closing_leaves_nothing(stage: Stage) -> None:
    """Its body is still on the way when the trial closes; then the rest comes."""
    session = stage.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
    body = json.dumps(ASK).encode()
    head = f"POST /t/a/v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {session.token}\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body[:10])
    await writer.drain()
    await asyncio.sleep(0.1)
    ledger = await stage.proxy.close("a")
    writer.write(body[10:])
    status = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    assert b" 500 " in status
    assert (stage.prompts, ledger.turns, ledger.segments) == ([], [], [])
    assert not stage.engine.running


async def test_a_request_in_its_first_moment_is_taken_back_by_closing(stage: Stage) -> None:
    """The trial closes before the request's task has run at all."""
    session = stage.open()
    assert (await get(stage, "/t/a/v1/models", **{"x-api-key": session.token})).status_code == 200
    from legorl.proxy.messages import ChatRequest, Message, Role
    from legorl.proxy.refusal import Refusal
    from tests.proxy.talk import MAIN

    request = ChatRequest((Message(Role.USER, "Hello?"),))
    asked = asyncio.create_task(session.complete(request, MAIN, "call_"))
    await asyncio.sleep(0)
    ledger = await stage.proxy.close("a")
    with pytest.raises((Refusal, asyncio.CancelledError)):
        await asked
    assert (ledger.turns, ledger.segments, session.turns) == ([], [], 0)
    assert not stage.engine.running


async def test_connections_beyond_the_bound_are_refused_and_the_others_live(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "CONNECTIONS", 4)
    session = stage.open()
    held = [socket.create_connection(("127.0.0.1", stage.port)) for _ in range(4)]
    reply = await get(stage, "/t/a/v1/models", **{"x-api-key": session.token})
    assert reply.status_code == 503
    assert reply.json()["error"]["message"]
    held.pop().close()
    await asyncio.sleep(0.1)
    assert (await get(stage, "/t/a/v1/models", **{"x-api-key": session.token})).status_code == 200
    for connection in held:
        connection.close()


async def test_a_head_that_never_ends_is_cut_off(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_TIMEOUT_S", 0.3)
    stage.open()
    for start in (b"", b"POST /t/a/v1/models HTTP/1.1\r\nx-slow: "):
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(start)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()

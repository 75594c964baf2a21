"""Budgets, joining, disconnects, closing and failures, over real connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import httpx
import pytest

from legorl.engine.base import Finish
from legorl.errors import ProxyError
from legorl.proxy import invariants
from tests.proxy.conftest import Stage

ASK = {"model": "any", "messages": [{"role": "user", "content": "Hello?"}]}


async def post(stage: Stage, token: str, body: object = ASK, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=10, verify=False) as client:
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
    # The words by which litellm, and OpenHands with it, knows that it has to shorten its history.
    assert refused.json()["error"]["message"].startswith("This model's maximum context length is")
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

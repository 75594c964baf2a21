"""An engine that is silent, or fails late, as the official clients see it.

The proxy beats every 0.2 s, the engine says nothing for longer than the clients wait for a byte.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from legorl.errors import EngineError
from legorl.proxy import app, invariants
from tests.proxy.conftest import Stage
from tests.proxy.test_clients import ASK, anthropic_client, openai_client

SILENCE_S = 1.5
PATIENCE_S = 1.0
WIRES = ["chat", "messages", "responses"]


async def ask(stage: Stage, token: str, wire: str, stream: bool) -> str:
    """One question through an official client that waits `PATIENCE_S` for a byte; the answer's text."""
    if wire == "messages":
        claude = anthropic_client(stage, token, PATIENCE_S)
        if not stream:
            message = await claude.messages.create(**ASK, max_tokens=9)
        else:
            async with claude.messages.stream(**ASK, max_tokens=9) as events:
                message = await events.get_final_message()
        return message.content[0].text
    client = openai_client(stage, token, PATIENCE_S)
    if wire == "responses":
        if not stream:
            return (await client.responses.create(model="any", input="Hello?")).output_text
        async with client.responses.stream(model="any", input="Hello?") as events:
            seen = [event async for event in events]
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            return (await events.get_final_response()).output_text
    if not stream:
        return (await client.chat.completions.create(**ASK)).choices[0].message.content or ""
    async with client.chat.completions.stream(**ASK) as events:
        return (await events.get_final_completion()).choices[0].message.content or ""


def test_the_interval_is_far_below_what_clients_wait() -> None:
    assert app.HEARTBEAT_S < 15


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_a_client_outwaits_a_silent_engine(stage: Stage, wire: str, stream: bool) -> None:
    session = stage.open()
    stage.hold = lambda: asyncio.sleep(SILENCE_S)
    begun = time.monotonic()
    assert await ask(stage, session.token, wire, stream) == "Hello."
    assert time.monotonic() - begun > SILENCE_S
    assert len(stage.prompts) == 1  # nobody asked again
    ledger = await stage.proxy.close("a")
    assert invariants.check(ledger) == []
    assert ledger.turns[0].delivered


async def test_no_silence_is_longer_than_the_interval(stage: Stage) -> None:
    session = stage.open()
    stage.hold = lambda: asyncio.sleep(SILENCE_S)

    async def gaps(endpoint: str, body: dict[str, Any]) -> list[float]:
        times = [time.monotonic()]
        async with (
            httpx.AsyncClient(timeout=10, verify=False) as client,
            client.stream(
                "POST", f"{stage.url()}/v1/{endpoint}", json=body, headers={"x-api-key": session.token}
            ) as reply,
        ):
            async for _ in reply.aiter_raw():
                times.append(time.monotonic())
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    for heard in await asyncio.gather(
        *(
            gaps(endpoint, {**body, "stream": stream})
            for endpoint, body in (("messages", {**ASK, "max_tokens": 9}), ("responses", {"input": "x"}))
            for stream in (False, True)
        )
    ):
        assert len(heard) >= 4
        assert max(heard) < PATIENCE_S


async def fail_late() -> None:
    await asyncio.sleep(0.5)
    raise EngineError("worker 3 died")


async def fail_at_once() -> None:
    raise EngineError("worker 3 died")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("fail", [fail_at_once, fail_late])
async def test_a_dead_engine_is_the_clients_server_error(
    stage: Stage, wire: str, stream: bool, fail: Callable[[], Awaitable[None]]
) -> None:
    """A document is cut off, and the client that asks again is told; a stream ends with the error."""
    session = stage.open()
    stage.hold = fail
    expected: tuple[type[Exception], ...] = (openai.InternalServerError, anthropic.InternalServerError)
    if stream and fail is fail_late:
        # The status was 200. Of a failed response the client's helper says only that it never completed.
        expected = (openai.APIError, anthropic.APIStatusError, RuntimeError)
    with pytest.raises(expected) as failed:
        await ask(stage, session.token, wire, stream)
    assert "worker" not in str(failed.value)
    assert len(stage.prompts) == 1
    assert isinstance(session.failure, EngineError)
    assert session.ended.is_set()
    ledger = await stage.proxy.close("a")
    assert (ledger.turns, ledger.segments) == ([], [])


async def test_a_response_that_fails_late_says_so_in_its_last_event(stage: Stage) -> None:
    session = stage.open()
    stage.hold = fail_late
    stream: Any = await openai_client(stage, session.token).responses.create(
        model="any", input="x", stream=True
    )
    seen = [event async for event in stream]
    assert [event.type for event in seen[:3]] == ["response.created", "response.in_progress", "keepalive"]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.failed"
    assert seen[-1].response.error.code == "server_error"
    assert seen[-1].response.id == seen[0].response.id

"""schemathesis makes valid and invalid requests from `openapi.py` and sends them to a real socket.

About a minute: `SECONDS` for each operation in each mode.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from legorl.engine.scripted import ScriptedEngine
from legorl.proxy import invariants
from legorl.proxy.proxy import Proxy
from legorl.proxy.render import Renderer
from tests.proxy.conftest import Stage
from tests.proxy.models import HermesLike
from tests.proxy.openapi import OPENAPI

SECONDS = 6.0
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture
def served(renderer: Renderer) -> Iterator[tuple[str, str, Stage]]:
    """A proxy on a socket, served from a thread of its own: base URL and token of an open trial."""
    ready: Future[tuple[str, str, Stage, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stage, done = Stage(renderer), asyncio.Event()
        stage.engine = ScriptedEngine(stage.play, renderer.tokenizer)
        stage.proxy = Proxy(stage.engine, renderer, HermesLike(), context_tokens=4096)
        sock = socket.create_server(("127.0.0.1", 0))
        stage.port = sock.getsockname()[1]
        await stage.proxy.attach(sock)
        session = stage.open(turn_limit=10**9, trial_tokens=10**9)
        ready.set_result((stage.url(), session.token, stage, asyncio.get_running_loop(), done))
        await done.wait()
        assert session.failure is None
        ledger = await stage.proxy.close("a")
        assert invariants.check(ledger) == []
        await stage.proxy.aclose()

    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    url, token, stage, loop, done = ready.result(10)
    yield url, token, stage
    loop.call_soon_threadsafe(done.set)
    thread.join(20)
    assert not thread.is_alive()
    assert not failed


def explore(
    operation: Any, mode: GenerationMode, url: str, token: str, sent: Counter[tuple[str, int]]
) -> None:
    """Send generated requests for `SECONDS`; statuses by path are counted in `sent`."""
    until, batch = time.monotonic() + SECONDS, itertools.count()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        reply = case.call(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=20)
        case.validate_response(reply, checks=CHECKS)
        sent[case.path, reply.status_code] += 1

    while time.monotonic() < until:
        seed(next(batch))(ask)()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_generated_requests(served: tuple[str, str, Stage]) -> None:
    url, token, stage = served
    sent: Counter[tuple[str, int]] = Counter()
    for found in schemathesis.openapi.from_dict(OPENAPI).get_all_operations():
        operation = found.ok()
        if operation.method == "post":
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                explore(operation, mode, url, token, sent)
    assert {status for _, status in sent} == {200, 400}, sent
    for path in OPENAPI["paths"]:
        if path != "/v1/models":
            assert min(sent[path, 200], sent[path, 400]) > 5, sent
    assert len(stage.prompts) > 60

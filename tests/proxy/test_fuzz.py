"""Generated requests: whatever comes, an answer or a refusal in the wire's shape, and the session goes on.

`test_schemathesis.py` does the same for longer.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legorl.proxy import invariants
from tests.proxy.conftest import Stage
from tests.proxy.test_hostile import ENDPOINTS, FULL, Client, open_wide, places

KEYS = sorted({str(path[-1]) for body in FULL.values() for path in places(body)})
WORDS = [
    "text",
    "tool_use",
    "tool_result",
    "function",
    "message",
    "user",
    "assistant",
    "system",
    "tool",
    "c1",
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | st.text(max_size=20) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[Client]:
    """A client whose session is unharmed in the end."""
    client = open_wide(stage)
    yield client
    await client.normal_turn()
    ledger = await stage.proxy.close("a")
    assert invariants.check(ledger) == []


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@given(data=st.data())
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_mutated_requests(client: Client, endpoint: str, data: st.DataObject) -> None:
    body: Any = copy.deepcopy(FULL[endpoint])
    for _ in range(data.draw(st.integers(1, 4), label="mutations")):
        path = data.draw(st.sampled_from(list(places(body)) or [()]), label="place")
        if not path:
            break
        parent = body
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = data.draw(VALUES, label="value")
    if body.get("stream") is not True:
        assert await client.post(endpoint, body) in (200, 400)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@given(body=VALUES)
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_any_json(client: Client, endpoint: str, body: Any) -> None:
    assert await client.post(endpoint, body) in (200, 400)

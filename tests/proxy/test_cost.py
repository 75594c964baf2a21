"""What a call costs does not grow with its history: counted, not timed (`benchmarks/proxy.py` times it)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.proxy import Ratio, table
from benchmarks.stage import EXPERTS_PER_TOKEN, LAYERS, Stage
from benchmarks.traffic import DIALECTS, Dialect, make_steps
from legorl.proxy import invariants
from legorl.proxy.body import Element
from legorl.proxy.messages import Role

TURNS = 24


@pytest.fixture(params=DIALECTS, ids=lambda dialect: dialect.name)
async def stage(request: pytest.FixtureRequest, model_dir: Path) -> Stage:
    """A trial's worth of turns in one harness's shapes, with routing."""
    dialect: Dialect = request.param
    # The tiny tokenizer makes several times as many tokens of a text.
    routing = np.arange(150_000 * LAYERS * EXPERTS_PER_TOKEN, dtype=np.uint8)
    steps = make_steps(TURNS, lambda text: len(text) // 3)
    return Stage(model_dir, dialect, steps, routing=routing.reshape(-1, LAYERS, EXPERTS_PER_TOKEN))


async def test_a_call_works_on_what_is_new_only(stage: Stage) -> None:
    session = stage.open("t")
    calls = [await stage.call(session, raw) for raw in stage.bodies()]
    assert session.ledger.counts == {"open": 1, "extend": TURNS - 1}
    (segment,) = session.ledger.segments
    assert len(segment) == sum(call.new for call in calls)
    sampled = [turn.end - turn.start for turn in session.ledger.turns]
    for call, reply in zip(calls[1:], sampled[1:], strict=True):
        # The generation prompt is tokenised once for all; the reply never is.
        assert call.encoded == call.new - reply - len(stage.renderer.generation_ids)
        assert call.rows == call.new
    assert calls[0].rows == calls[0].new - 1  # the last token has no row yet
    assert invariants.check(session.ledger) == []


async def test_old_routing_rows_stay_where_they_are(stage: Stage) -> None:
    session = stage.open("t")
    *raws, last = stage.bodies()
    for raw in raws:
        await stage.send(session, raw)
    routing = session.ledger.segments[0].routing
    assert routing is not None
    before = list(routing._blocks)
    await stage.send(session, last)
    assert all(old is new for old, new in zip(before, routing._blocks, strict=False))
    assert len(routing._blocks) == len(before) + 1
    held = sum(block.nbytes for block in routing._blocks)
    assert held == len(routing) * LAYERS * EXPERTS_PER_TOKEN


async def test_old_messages_are_decoded_and_read_once(stage: Stage) -> None:
    reader = stage.open("t").bodies
    *_, last = stage.bodies()
    first, again = reader.read(last), reader.read(last)
    pairs = [
        (element, again[name][at])
        for name, value in first.items()
        if isinstance(value, list)
        for at, element in enumerate(value)
        if isinstance(element, Element)
    ]
    assert len(pairs) > 2 * TURNS
    assert all(one is other for one, other in pairs)
    one, other = stage.wire.parse(first), stage.wire.parse(again)
    assert one.messages == other.messages
    for a, b in zip(one.messages, other.messages, strict=True):
        assert a.text is b.text or a.role is Role.SYSTEM  # which may be joined from several blocks
    assert all(a is b for a, b in zip(one.tools, other.tools, strict=True))


def test_the_report_says_what_missed() -> None:
    lines = table(
        [
            Ratio("a", "slow", 0.05, 1 / 60, "3 / 60 ms"),
            Ratio("b", "slow", 1 / 100, 1 / 60, "1 / 100 ms"),
            Ratio("b", "many", 12.0, 10, "12 / 1 per s", at_least=True),
        ]
    ).splitlines()
    assert lines[0] == "| ratio | bound | a | b |"
    assert lines[2] == "| slow | ≤ 1/60 | **1/20** (3 / 60 ms) MISSED | **1/100** (1 / 100 ms) |"
    assert lines[3] == "| many | ≥ 10 |  | **12** (12 / 1 per s) |"

"""Recorded traffic of real harnesses through wire, speaker rule, alignment and ledger."""

from __future__ import annotations

import argparse
import asyncio
import copy
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legorl.errors import UserError
from legorl.proxy.render import Renderer
from legorl.trial.commands import _default_renderer, add_parser, run
from legorl.trial.recording import read_records
from legorl.trial.replay import Report, replay
from legorl.trial.replay_report import short_name, table
from tests.captures import CAPTURES, load_capture

PAGE = Path(__file__).parent.parent.parent / "docs" / "capture.md"


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return _default_renderer()


@pytest.fixture(scope="session")
def reports(renderer: Renderer) -> list[Report]:
    return [asyncio.run(replay(path, renderer))[0] for path in CAPTURES]


def test_every_recorded_turn_is_in_the_loss_once_as_it_was_sampled(reports: list[Report]) -> None:
    assert len(reports) >= 32
    for report, path in zip(reports, CAPTURES, strict=True):
        records = load_capture(path)
        assert report.ok, report
        assert not report.misattributed
        assert report.model_turns == len(records) == sum(report.aligned.values())
        assert report.recovered + len(report.orphans) == report.model_turns
        assert report.retokenized_loss_tokens == 0
        assert report.loss_tokens > 0
        kinds = {
            "main" if r["kind"] == "main" else "subagent" if r["kind"] == "sub" else "side" for r in records
        }
        assert set(report.threads) == kinds


def test_the_documented_table_is_what_comes_out(reports: list[Report]) -> None:
    (shown,) = re.findall(r"```\n(file  .*?)\n```", PAGE.read_text(), re.S)
    assert shown.splitlines() == list(table(reports))


def test_what_the_harness_threw_away_is_an_orphan(reports: list[Report]) -> None:
    orphans = {short_name(report.file): report.orphans for report in reports if report.orphans}
    assert {name: [(o.n, o.text) for o in found] for name, found in orphans.items()} == {
        "claude-cut": [(1, "never delivered")],
        "codex-cut": [(1, "never delivered")],
        "opencode-cut": [(2, "never delivered")],
        "qwen-awkward": [(5, "replaced")],
        "qwen-maxtok": [(1, "replaced")],
    }


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return run(parser.parse_args(["trial", "replay", *words]))


BASIC = next(path for path in CAPTURES if path.name.startswith("mini-basic"))


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(BASIC), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    assert document["errors"] == {}
    (report,) = document["files"]
    assert report["aligned"] == {"open": 1, "extend": 4, "fork": 0, "retry": 0}
    assert (report["harness"], report["model_turns"], report["recovered"]) == ("mini_swe_agent", 5, 5)
    assert (report["orphans"], report["lost"], report["violations"]) == ([], [], [])
    assert report["turns_by_thread"] == {"main": 5}


def edited(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """A plain copy of the basic recording of mini-swe-agent, changed."""
    records = [json.loads(json.dumps(record)) for record in load_capture(BASIC)]
    change(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def cut(records: list[dict[str, Any]]) -> None:
    lost = json.loads(json.dumps(records[2]))
    lost["client_gone"] = "reset by peer"
    lost["response"]["choices"][0]["message"]["tool_calls"][0]["id"] = "call_lost"
    records.insert(2, lost)
    for n, record in enumerate(records):
        record["n"] = n


def overload(records: list[dict[str, Any]]) -> None:
    records.insert(
        2, {**records[2], "status": 429, "scripted": [], "response": {"error": {"message": "slow"}}}
    )


def probe(records: list[dict[str, Any]]) -> None:
    records.insert(
        0, {"n": -1, "method": "GET", "path": "/v1/models", "headers": [], "body": None, "status": 200}
    )


EDITED = {
    "a reply that never arrived": (cut, {"orphans": 1, "model_turns": 6, "recovered": 5, "ok": True}),
    "an overloaded server": (overload, {"skipped": {"status 429": 1}, "recovered": 5, "ok": True}),
    "a request that is none for a reply": (probe, {"skipped": {"/v1/models": 1}, "recovered": 5, "ok": True}),
    "another speaker": (lambda r: r[0].update(kind="side"), {"misattributed": 1, "recovered": 5, "ok": True}),
    "nothing scripted": (lambda r: r[4].pop("scripted"), {"lost": 1, "recovered": 4, "ok": False}),
    "no body": (lambda r: r[4].update(body=None), {"lost": 1, "recovered": 4, "ok": False}),
    "a body the wire refuses": (lambda r: r[4]["body"].update(messages=5), {"lost": 1, "ok": False}),
    "half a surrogate": (lambda r: r[4]["body"]["messages"][0].update(content="\ud83d"), {"ok": True}),
    "a reply cut at its token limit": (
        lambda r: r[4]["response"]["choices"][0].update(finish_reason="length"),
        {"recovered": 5, "ok": True},
    ),
    "no reply text at all": (lambda r: r[4].update(scripted=[]), {"recovered": 5, "ok": True}),
    "fewer call ids than calls": (
        lambda r: r[4]["response"]["choices"][0]["message"].pop("tool_calls"),
        {"recovered": 5, "ok": True},
    ),
}


@pytest.mark.parametrize("name", EDITED)
async def test_other_things_that_are_recorded(renderer: Renderer, tmp_path: Path, name: str) -> None:
    change, expected = EDITED[name]
    report, _ = await replay(edited(tmp_path / "edited.jsonl", change), renderer)
    for field, value in expected.items():
        found = getattr(report, field)
        assert (len(found) if isinstance(found, list) else found) == value, field


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "holds no record"),
    "not json": (b"{}\nwhat", "line 1"),
    "a list": (b"[1]", "line 1: the line is list, not an object"),
    "broken json": (b'{"path": "/v1/messages", ', "line 1"),
    "deep": (b"[" * 200_000, "line 1"),
    "binary": (b"\xff\xfe\x00", "neither gzip nor UTF-8"),
    "cut gzip": (gzip.compress(b"x" * 1000)[:-9], "cannot be read"),
    "broken gzip": (b"\x1f\x8b\x08garbage", "cannot be read"),
    "no path": (b'{"n": 0}', "line 1: path is NoneType, not a string"),
    "no known wire": (b'{"path": "/v1beta/models/g:generateContent", "body": {}}', "no request on a wire"),
    "headers of another shape": (b'{"path": "/v1/messages", "headers": [["a"]]}', "is no header"),
    "n a word": (b'{"path": "/v1/messages", "n": "x"}', "n is str, not a number"),
    "scripted of another shape": (b'{"path": "/v1/messages", "scripted": [["dance"]]}', "no scripted block"),
    "sse a word": (b'{"path": "/v1/messages", "sse": "x"}', "sse is str, not a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, name: str) -> None:
    data, message = BAD[name]
    file = tmp_path / "bad.jsonl"
    file.write_bytes(data)
    with pytest.raises(UserError, match=re.escape(message)):
        asyncio.run(replay(file, None))  # type: ignore[arg-type] - it is not reached


def test_bad_files_do_not_hide_good_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text("what")
    assert command(str(tmp_path / "bad.jsonl"), str(BASIC), str(tmp_path / "missing"), str(tmp_path)) == 1
    out = capsys.readouterr().out
    assert re.search(r"mini-basic +mini_swe_agent +5 +5 .*good", out)
    assert out.count("error: ") == 3
    assert "missing does not exist" in out
    assert command(str(tmp_path / "bad.jsonl")) == 1
    assert capsys.readouterr().out.startswith("error: ")


ODD = [None, 5, -1, 1.5, "x", "", [], {}, True, [[1]], {"type": "text"}, "\ud83d", "\0", 10**30]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in [(*path, key), *places(item, (*path, key))]]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_odd_values_anywhere_end_in_a_report_or_one_clear_error(
    renderer: Renderer, tmp_path: Path, data: st.DataObject
) -> None:
    records = json.loads(json.dumps(load_capture(BASIC)[:3]))
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places(records)))
        holder = records
        for key in path:
            holder = holder[key]
        holder[last] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
    file = tmp_path / "odd.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        report, _ = asyncio.run(replay(file, renderer))
    except UserError as error:
        assert str(file) in str(error)
    else:
        assert report.violations == []
        assert report.retokenized_loss_tokens == 0
        assert not any("the proxy failed" in remark.text for remark in report.lost)


def test_a_harness_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(BASIC), "--harness", "codex", "--json") == 0
    assert json.loads(capsys.readouterr().out)["files"][0]["harness"] == "codex"
    assert command(str(BASIC), "--harness", "nobody") == 1
    assert "Known: claude_code, codex" in capsys.readouterr().out


def test_requests_come_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    shuffled = edited(tmp_path / "shuffled.jsonl", lambda records: records.reverse())
    assert [record.n for record in read_records(shuffled)] == [0, 1, 2, 3, 4]

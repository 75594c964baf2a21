"""`status` and `show` on finished, running, killed and broken runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from legorl.config import rundir
from legorl.errors import UserError
from legorl.tracking import commands
from legorl.tracking.events import Canary, EventLog, Heldout, Pool, Step, Trial
from legorl.tracking.show import choose_examples, plot, show
from legorl.tracking.status import RunHistory, run_status
from legorl.trial.archive import Started, mark_started
from legorl.trial.record import PhaseRecord
from tests.tracking.support import broken, make_history, trial


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers(dest="command"))
    return commands.run(parser.parse_args(argv))


def test_status_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make_history(tmp_path)
    rundir.end_run(first, "finished")
    second = make_history(tmp_path, name="20260102-000000-bbbb")
    with rundir.lock(second):
        assert call("status", "--json", "--runs", str(tmp_path)) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [(run["id"], run["state"]) for run in runs] == [(second.name, "running"), (first.name, "finished")]
    run = runs[1]
    assert (run["step"], run["steps"]) == (3, 3)
    assert run["reward"] == {"first": 0.5, "last": 1.0}
    assert run["heldout"] == {"first": 0.25, "last": 1.0, "n": 4}
    assert run["alignment"]["pearson_min"] == pytest.approx(0.9991)
    assert run["alignment"]["pearson_median"] == pytest.approx(0.9992)
    assert run["alignment"]["mean_abs"] == pytest.approx(0.01)
    assert run["terminations"] == {"submitted": 20, "sandbox_start": 3} and run["excluded"] == 3
    assert run["path"] == str(first) and 59 < run["wall_s"] < 120


def test_a_run_that_nobody_holds_was_killed(tmp_path: Path) -> None:
    status = run_status(RunHistory.read(make_history(tmp_path)))
    assert (status.state, status.reason) == ("killed", "its supervisor is gone")


def test_a_run_without_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_history(tmp_path, steps=1)
    (run_dir / "events.jsonl").unlink()
    status = run_status(RunHistory.read(run_dir))
    assert (status.step, status.reward.last, status.heldout.n, status.terminations) == (0, None, 0, {})
    assert call("show", "last", "--runs", str(tmp_path)) == 0
    assert "no step yet" in capsys.readouterr().out


def test_a_broken_directory_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_history(tmp_path)
    bad = make_history(tmp_path, name="20260102-000000-bbbb")
    (bad / "run.json").write_text("{")
    call("status", "--runs", str(tmp_path))
    captured = capsys.readouterr()
    assert "20260101-000000-aaaa" in captured.out and "20260102-000000-bbbb cannot be read" in captured.err


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"id": "a"}',
        b'{"id": "a", "steps": "x", "created": 1}',
    ],
)
def test_a_damaged_description_is_one_message(tmp_path: Path, text: bytes) -> None:
    run_dir = make_history(tmp_path)
    (run_dir / "run.json").write_bytes(text)
    with pytest.raises(UserError, match="is not a run description"):
        call("show", run_dir.name, "--runs", str(tmp_path))


@pytest.mark.parametrize(
    "line",
    [
        b'{"t": 1, "kind": "step"}',
        b'{"kind": "step", "step": 1, "metrics": {}}',
        b'{"t": 1, "kind": "step", "step": 1, "metrics": [3]}',
        b'{"t": 1, "kind": "step", "step": 1, "metrics": {"reward/mean": "much"}}',
        b'{"t": "now", "kind": "end", "step": 1}',
        b'{"t": 1, "kind": "heldout", "step": 1, "success": "yes", "n": 1}',
        b'{"t": 1, "kind": "trial", "id": "a"}',
        b'{"t": 1, "kind": "fatal"}',
    ],
)
def test_an_event_that_is_none_is_one_message_and_hides_no_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    good = make_history(tmp_path, name="20260102-000000-bbbb")
    bad = make_history(tmp_path)
    with (bad / "events.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(UserError, match=r"events.jsonl cannot be read \(\w+: .*\)"):
        call("show", bad.name, "--runs", str(tmp_path))
    assert call("status", "--runs", str(tmp_path)) == 0
    captured = capsys.readouterr()
    assert good.name in captured.out and f"{bad} cannot be read" in captured.err


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    """Torn or binary ones, and those of a later version."""
    run_dir = make_history(tmp_path)
    before = run_status(RunHistory.read(run_dir))
    with (run_dir / "events.jsonl").open("ab") as file:
        file.write(b'{"t": 1, "ki\n\0\xff\xfe\r\n\n[]\n3\n' + b"[" * 100_000 + b'\n{"kind": [], "t": 1}\n')
        file.write(b'{"t": 1, "kind": "later", "x": 1}\n{"t": 1, "kind": "step", "step": 3, "metr')
    after = run_status(RunHistory.read(run_dir))
    assert (after.step, after.reward, after.terminations) == (before.step, before.reward, before.terminations)


def test_metrics_that_are_no_numbers_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_history(tmp_path)
    log = EventLog(run_dir)
    log.write(Step(4, {"reward/mean": math.nan}))
    log.write(Heldout(4, math.nan, 0))
    log.write(Canary(4, math.inf, False))
    assert run_status(RunHistory.read(run_dir)).reward.last == 1.0
    assert call("show", run_dir.name, "--runs", str(tmp_path)) == 0


def test_a_clock_set_back_gives_no_negative_time(tmp_path: Path) -> None:
    run_dir = make_history(tmp_path)
    info = rundir.read_info(run_dir)
    rundir.write_info(run_dir, dataclasses.replace(info, created=info.created + 1e6))
    assert run_status(RunHistory.read(run_dir)).wall_s == 0
    rundir.end_run(run_dir, "finished")
    assert run_status(RunHistory.read(run_dir)).wall_s == 0


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_history(tmp_path)
    rundir.end_run(run_dir, "failed", "the engine died")
    assert call("show", "20260101", "--runs", str(tmp_path)) == 0
    page = capsys.readouterr().out
    for part in (
        "failed, step 3/3",
        "reason: the engine died",
        "reward (training trials): 0.500 → 1.000",
        "held-out success: 0.250 → 1.000",
        "green submissions (held-out)",
        "23 trials, 3 excluded",
        "the sandbox did not start",
        "groups had one reward in all kept trials",
        "30.0 s  warm_start",
        "step: update",
        f"legorl trial show {run_dir}/trials/step_0001/t",
        "events.jsonl",
    ):
        assert part in page
    assert page.count("legorl trial show") == 5


def test_show_what_infrastructure_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_history(tmp_path)
    log = EventLog(run_dir)
    retried = PhaseRecord("setup", 1.0, 2.0, 3, "", ("transfer", "sandbox_start"))
    log.write(Trial(trial(70, phases=(retried,))))
    start = {"count": 9, "p50_s": 0.02, "p99_s": 1.5, "failures": {"sandbox_start": 1}}
    log.write(Pool(pid=7, in_use=2, warm=0, warm_used=0, breaker="closed", operations={"start": start}))
    log.close()
    mark_started(
        run_dir / "trials/step_0001/t71", Started("t71", "a", "g", "train", 1, "mini_swe_agent", 0.0)
    )
    page = show(RunHistory.read(run_dir))
    assert "infrastructure (2 attempts at a phase were made again)" in page
    assert re.search(r"1  setup +transfer", page) and "1  interrupted: its process was killed" in page
    assert re.search(r"start +9 +0\.020 s +1\.500 s  sandbox_start 1", page)


def test_a_wrong_id(tmp_path: Path) -> None:
    make_history(tmp_path)
    with pytest.raises(UserError, match=r"no run 'nope'.*Near: 20260101-000000-aaaa"):
        call("show", "nope", "--runs", str(tmp_path))


def test_examples_are_different_and_new() -> None:
    trials = [trial(n, 1.0, step=2) for n in range(5)] + [trial(7, 0.0, step=1), broken(8)]
    chosen = choose_examples(trials, 4)
    assert {(t.termination, t.reward) for t in chosen[:3]} == {
        ("submitted", 1.0),
        ("submitted", 0.0),
        ("sandbox_start", None),
    }
    assert [t.step for t in chosen[3:]] == [2]


def test_plot_grows_with_the_values() -> None:
    lines = plot([(step, step / 10) for step in range(1, 11)], height=4, top=1.0)
    assert len(lines) == 6
    bars = [line.partition("│")[2] for line in lines[:4]]
    heights = [sum(row[column] != " " for row in bars) for column in range(len(bars[0]))]
    assert heights == sorted(heights) and heights[0] < heights[-1] == 4
    assert lines[0].startswith("    1.00") and lines[3].startswith("    0.00")
    flat = plot([(0, 0.0)], top=None)
    assert "█" not in "".join(flat)
    assert max(len(line) for line in plot([(n, -1.0 * n) for n in range(500)], width=50)) <= 60

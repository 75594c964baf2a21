"""The event log: what is written is read, whatever a crash left."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

from legorl.tracking.events import (
    EventLog,
    EventReader,
    Fatal,
    Heldout,
    Phase,
    Start,
    Step,
    Trial,
    read_events,
)
from legorl.trial.record import TrialRecord
from tests.tracking.support import trial


def test_round_trip(tmp_path: Path) -> None:
    record = trial(3, 0.5, violations=("I2",))
    log = EventLog(tmp_path)
    for event in (
        Start(4),
        Phase("warm_start", 1.5),
        Trial(record),
        Step(1, {"reward/mean": 0.5}),
        Fatal("x"),
    ):
        log.write(event)
    log.close()
    log.close()
    events = read_events(tmp_path)
    assert [event["kind"] for event in events] == ["start", "phase", "trial", "step", "fatal"]
    assert events[0]["steps"] == 4 and events[3] == events[3] | {"step": 1, "metrics": {"reward/mean": 0.5}}
    fields = {key: value for key, value in events[2].items() if key not in ("t", "kind")}
    assert TrialRecord.from_json(fields) == record
    assert events[0]["t"] <= events[-1]["t"]


def test_no_log_is_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []


def test_a_torn_last_line_is_left_and_a_resumed_log_goes_on(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write(Step(1, {}))
    log.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"t": 1, "kind": "st')
    assert [event["step"] for event in read_events(tmp_path)] == [1]
    log = EventLog(tmp_path)
    log.write(Step(2, {}))
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2]


def test_reader_gives_each_event_once(tmp_path: Path) -> None:
    reader, log = EventReader(tmp_path), EventLog(tmp_path)
    assert list(reader.new()) == []
    log.write(Phase("a", 1))
    assert [event["name"] for event in reader.new()] == ["a"]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"t": 1, "kind": "phase", ')
        file.flush()
        assert list(reader.new()) == []
        file.write('"name": "b"}\n')
    assert [event["name"] for event in reader.new()] == ["b"]


def test_a_metric_that_is_not_a_number_is_null(tmp_path: Path) -> None:
    EventLog(tmp_path).write(Heldout(0, float("nan"), 0, {"heldout/n": 0.0, "x": float("inf")}))
    line = (tmp_path / "events.jsonl").read_text()
    event = json.loads(line, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert event["success"] is None and event["metrics"] == {"heldout/n": 0.0, "x": None}


def _append(run_dir: Path, writer: int) -> None:
    log = EventLog(run_dir)
    for number in range(200):
        log.write(Phase(f"{writer}-{number}-" + "x" * 5000, 0.0))


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(tmp_path, writer)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(30)
    names = [event["name"] for event in read_events(tmp_path)]
    assert len(names) == 800
    for writer in range(4):
        own = [name.split("-")[1] for name in names if name.startswith(f"{writer}-")]
        assert own == [str(number) for number in range(200)]

"""A process that is killed while it writes trials leaves each of them whole, or saying that it is not."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from legorl.errors import UserError
from legorl.proxy import invariants
from legorl.proxy.render import Renderer
from legorl.proxy.store import load
from legorl.trial.archive import Remains, write_trial
from legorl.trial.record import TrialRecord, read_record
from tests.proxy.models import write_model
from tests.proxy.talk import Talk, result, system, user
from tests.trial.test_record import RECORD

KILLS = 300
ENOUGH = 10
IDS = ("a", "b", "c")


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    """A trial of some size, so that writing it takes a while."""
    talk = Talk(Renderer.load(write_model(tmp_path / "model")))
    history = [system("You help."), user("Fix it.")]
    for number in range(30):
        turn = talk.ask(
            history, '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
        )
        history += [turn.message, result(turn.message.calls[0], f"a.py {number} " * 200)]
    talk.ledger.finish()
    return talk


def write_for_ever(talk: Talk, directory: Path) -> None:
    while True:
        for trial in IDS:
            write_trial(replace(RECORD, id=trial), Remains(ledger=talk.ledger), directory / trial)


def test_killed_while_writing(talk: Talk, tmp_path: Path) -> None:
    seed = random.Random(0)
    whole = broken = attempt = 0
    longest = 0.05  # follows the machine: about half of the trials are to be whole
    while min(whole, broken) < ENOUGH:
        attempt += 1
        assert attempt < KILLS, f"{whole} whole and {broken} broken ones"
        directory = tmp_path / str(attempt)
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(talk, directory)
            finally:
                os._exit(1)
        time.sleep(seed.uniform(0.002, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for trial in IDS:
            record = recorded(directory / trial)
            whole += record is not None
            broken += record is None and (directory / trial).exists()
        longest = min(1.0, longest * 1.3) if whole < broken else max(0.02, longest / 1.3)


def recorded(directory: Path) -> TrialRecord | None:
    """The record, if there is one, and then everything is; None for one that says that it is not whole."""
    try:
        record = read_record(directory)
    except UserError as error:
        assert "interrupted" in str(error)
        return None
    transcript = load(directory)
    assert invariants.check(transcript) == []
    assert len(transcript.turns) == 30
    return record


BAD_RECORDS = {
    "empty": b"",
    "cut": b'{"id": "t1", "task": ',
    "a list": b"[]",
    "not text": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "a word for a number": json.dumps({**RECORD.to_json(), "step": "x"}).encode(),
    "a reward that is text": json.dumps({**RECORD.to_json(), "reward": "high"}).encode(),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_damaged_record_is_a_clear_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "trial.json").write_bytes(BAD_RECORDS[name])
    with pytest.raises(UserError, match="is not a trial record"):
        read_record(tmp_path)

"""What is written can be read, checked and shown; what is damaged says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from legorl.errors import UserError
from legorl.harness.base import Speaker, ThreadKind
from legorl.proxy import invariants
from legorl.proxy.render import Renderer
from legorl.proxy.store import ARRAYS, MESSAGES, load, save
from legorl.trial.commands import add_parser, run
from legorl.trial.record import write_record
from tests.proxy.models import call_text
from tests.proxy.talk import Talk, result, system, user
from tests.trial.test_record import RECORD

START = [system("You help."), user("Fix [it].")]


@pytest.fixture
def talk(renderer: Renderer) -> Talk:
    """A fork, an orphan, a side thread."""
    talk = Talk(renderer)
    talk.ask(START, "thrown away")
    first = talk.ask(START, call_text("bash", '{"command": "ls"}', "Look."))
    history = [*START, first.message, result(first.message.calls[0], "a.py")]
    talk.ask(history, "no call")
    talk.ask([*history, user("error: no tool call")], "Done.")
    talk.ask([user("Title?")], "A title", speaker=Speaker(ThreadKind.SIDE, key="title"))
    talk.ledger.finish()
    return talk


def test_everything_comes_back(talk: Talk, tmp_path: Path) -> None:
    save(talk.ledger, tmp_path)
    again = load(tmp_path)
    assert invariants.check(again) == []
    assert again.counts == talk.ledger.counts
    assert [t.message for t in again.turns] == [t.message for t in talk.ledger.turns]
    assert [o.turn.orphan for o in again.orphans] == ["replaced"]
    assert again.orphans[0].turn.token_ids.tolist() == talk.samples["c0"]
    for ours, theirs in zip(talk.ledger.rows(("main", "side")), again.rows(("main", "side")), strict=True):
        assert ours.calls == theirs.calls
        assert np.array_equal(ours.routed_experts, theirs.routed_experts)
        assert np.array_equal(ours.logprobs, theirs.logprobs, equal_nan=True)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("missing", [ARRAYS, MESSAGES])
def test_an_interrupted_record_says_so(talk: Talk, tmp_path: Path, missing: str) -> None:
    save(talk.ledger, tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(UserError, match="interrupted"):
        load(tmp_path)


@pytest.mark.parametrize("damaged", [ARRAYS, MESSAGES])
def test_a_truncated_file_says_so(talk: Talk, tmp_path: Path, damaged: str) -> None:
    save(talk.ledger, tmp_path)
    data = (tmp_path / damaged).read_bytes()
    (tmp_path / damaged).write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(UserError, match="damaged"):
        load(tmp_path)


@pytest.mark.parametrize("damaged", [ARRAYS, MESSAGES])
def test_every_flipped_bit_is_found(talk: Talk, tmp_path: Path, damaged: str) -> None:
    save(talk.ledger, tmp_path)
    data = (tmp_path / damaged).read_bytes()
    positions = {0, len(data) // 2, len(data) - 1, *range(3, len(data), max(1, len(data) // 400))}
    for position in positions:
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        (tmp_path / damaged).write_bytes(flipped)
        try:
            again = load(tmp_path)
        except UserError as error:
            assert "damaged" in str(error)
        else:  # a bit of the compression's own, which says nothing
            assert damaged == MESSAGES
            assert [t.message for t in again.turns] == [t.message for t in talk.ledger.turns]


def test_files_of_two_transcripts_do_not_go_together(talk: Talk, renderer: Renderer, tmp_path: Path) -> None:
    save(talk.ledger, tmp_path)
    other = Talk(renderer)
    other.ask(START, "Hello.")
    save(other.ledger, tmp_path / "other")
    (tmp_path / "other" / ARRAYS).rename(tmp_path / ARRAYS)
    with pytest.raises(UserError, match=r"segments\.npz has changed"):
        load(tmp_path)


def test_no_trial_there_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path, "interrupted"),
        (tmp_path / "none", "interrupted"),
        (tmp_path / "file", "dam"),
    ):
        with pytest.raises(UserError, match=message):
            command("check", str(path))
        with pytest.raises(UserError, match=message):
            command("show", str(path))


def command(*words: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return run(parser.parse_args(["trial", *words]))


def test_show_and_check(talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(talk.ledger, tmp_path)
    assert command("check", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "I1 to I4 hold: 3 rows, 4 replies" in out
    assert "no trial.json" in out
    write_record(replace(RECORD, id="other", violations=()), tmp_path)
    assert command("check", str(tmp_path)) == 1
    assert "trial.json is of other, the transcript of t" in capsys.readouterr().out
    write_record(replace(RECORD, id="t", violations=()), tmp_path)
    assert command("check", str(tmp_path)) == 0
    assert command("show", str(tmp_path), "--tokens") == 0
    out = capsys.readouterr().out
    for expected in ("thread side:title", "Fix [it].", 'bash({"command": "ls"})', "orphan c0", "<|im_end|>"):
        assert expected in out


TAMPERING = {
    "a token of a prompt": ("I3", lambda s: s.tokens.view.__setitem__(3, 7)),
    "a sampled token": ("I1", lambda s: s.tokens.view.__setitem__(int(np.flatnonzero(s.mask.view)[0]), 7)),
    "a log-prob lost": (
        "I1",
        lambda s: s.logprobs.view.__setitem__(int(np.flatnonzero(s.mask.view)[0]), np.nan),
    ),
    "a context token in the loss": ("I1", lambda s: s.mask.view.__setitem__(2, True)),
    "a version lost": ("I1", lambda s: s.versions.view.__setitem__(int(np.flatnonzero(s.mask.view)[0]), -1)),
    "a routing row lost": (
        "I1",
        lambda s: s.routed.view.__setitem__(int(np.flatnonzero(s.mask.view)[0]) - 1, False),
    ),
    "a call in no row": ("I2", lambda s: s.mask.view.__setitem__(slice(None), False)),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_check_finds(talk: Talk, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(talk.ledger, tmp_path)
    transcript = load(tmp_path)
    invariant, tamper = TAMPERING[name]
    tamper(transcript.segments[0])
    found = invariants.check(transcript)
    assert any(invariant in violation for violation in found)
    save(transcript, tmp_path)
    assert command("check", str(tmp_path)) == 1
    assert invariant in capsys.readouterr().out


def test_a_call_twice_and_an_orphan_in_the_loss_are_found(talk: Talk) -> None:
    rows = talk.ledger.rows()
    assert any("I2" in v for v in invariants.check([*rows, rows[0]]))
    turn = next(turn for turn in talk.ledger.turns if not turn.orphan)
    turn.orphan = "said to be"
    assert invariants.check(talk.ledger)


def test_row_weights_are_one_vote(talk: Talk) -> None:
    rows = talk.ledger.rows()
    assert len(rows) == 2
    weights = invariants.row_weights(rows)
    assert weights.sum() == pytest.approx(1.0)
    assert weights[0] / weights[1] == pytest.approx(rows[0].loss_mask.sum() / rows[1].loss_mask.sum())

"""`legorl tasks ...` as typed, without a terminal."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from legorl.errors import UserError
from legorl.tasks import commands

Command = Callable[..., list[str]]


@pytest.fixture
def tasks(pools: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line on the fixture's pools; gives the lines it printed."""

    def call(*argv: str) -> list[str]:
        parser = argparse.ArgumentParser()
        commands.add_parser(parser.add_subparsers())
        assert commands.run(parser.parse_args(["tasks", *argv, "--pools", str(pools)])) == 0
        return capsys.readouterr().out.splitlines()

    return call


def test_list(tasks: Command) -> None:
    head, row = tasks("list")
    assert head.split("\t")[:3] == ["pool", "train", "heldout"]
    assert row.split("\t")[:3] == ["repair-0", "5", "2"]
    assert "tiny policy" in row
    assert len(tasks("list", "repair-0")) == 8
    assert [line.split("\t")[1] for line in tasks("list", "repair-0", "--split", "heldout")] == [
        "split",
        "heldout",
        "heldout",
    ]


def test_show_hides_the_solution_unless_asked(tasks: Command, pools: Path) -> None:
    lines = tasks("show", "repair-0-train-0000")
    text = "\n".join(lines)
    task = pools / "repair-0" / "tasks" / "repair-0-train-0000"
    assert (task / "instruction.md").read_text() in text
    assert "split: train" in lines
    assert "test command: python check.py" in lines
    assert any(line.startswith("check.py (") for line in lines)
    assert "+++" not in text
    assert tasks("show", str(task)) == lines
    patch = (task / "solution" / "fix.patch").read_text()
    assert "\n".join(tasks("show", task.name, "--solution")).endswith(f"--- reference fix\n{patch.rstrip()}")


def test_synth_of_an_existing_pool_does_nothing(tasks: Command) -> None:
    (line,) = tasks("synth", "repair", "--train", "5", "--heldout", "2")
    assert "5 train, 2 held-out" in line


def test_wrong_names_are_answered_with_near_ones(tasks: Command) -> None:
    for argv, near in (
        (("synth", "repai"), "'repair'"),
        (("list", "repair-1"), "repair-0"),
        (("show", "repair-0-train-0009"), "repair-0-train-000"),
        (("validate", "repair0"), "repair-0"),
        (("show", "zzz"), "legorl tasks list"),
    ):
        with pytest.raises(UserError, match=near):
            tasks(*argv)


def test_no_pools_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(argparse.Namespace(tasks_command="list", pool=None, split=None, pools=tmp_path)) == 0
    assert "legorl tasks synth repair" in capsys.readouterr().out


def test_a_changed_task_is_not_shown_as_if_nothing_were(tasks: Command, pools: Path) -> None:
    (pools / "repair-0" / "tasks" / "repair-0-train-0000" / "instruction.md").write_text("other")
    with pytest.raises(UserError, match="was changed"):
        tasks("show", "repair-0-train-0000")


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("task.toml", b"[task]", b"[[[", "not valid TOML"),
        ("task.toml", b"[task]", b"\xff", "not all in UTF-8"),
        ("task.toml", b"[metadata.legorl]\nid = ", b"[metadata.legorl]\nname = ", "lacks the field 'id'"),
        ("task.toml", b"timeout_sec = 60.0", b'timeout_sec = "soon"', "a field of a wrong type: .*'soon'"),
        ("task.toml", b"timeout_sec = 60.0", b"timeout_sec = nan", "timeout_sec=nan is no number of seconds"),
        ("task.toml", b"timeout_sec = 60.0", b"timeout_sec = -5", "timeout_sec=-5.0 is no number of seconds"),
        ("task.toml", b"hidden_tests = [", b"hidden_tests = 3\nothers = [", "a field of a wrong type"),
        ("task.toml", b'pass_pattern = "', b'pass_pattern = "(', "is no regular expression"),
        ("task.toml", None, b"metadata = 3", "a field of a wrong type"),
        ("instruction.md", None, b"\xff\xfe", "not all in UTF-8"),
    ],
)
def test_a_broken_task_is_one_message(
    tasks: Command, pools: Path, file: str, old: bytes | None, new: bytes, message: str
) -> None:
    task = pools / "repair-0" / "tasks" / "repair-0-train-0000"
    text = (task / file).read_bytes()
    assert old is None or old in text
    (task / file).write_bytes(new if old is None else text.replace(old, new))
    for command in ("show", "validate"):
        with pytest.raises(UserError, match=message):
            tasks(command, str(task))


@pytest.mark.parametrize("name", ["instruction.md", "environment", "tests", "tests/test.sh"])
def test_a_task_without_a_part_is_one_message(tasks: Command, pools: Path, name: str) -> None:
    task = pools / "repair-0" / "tasks" / "repair-0-train-0000"
    (task / name).rename(pools / "away")
    with pytest.raises(UserError, match=f"is not a task directory: .*{name}"):
        tasks("show", str(task))


def test_a_task_without_its_fix_can_be_shown_and_not_validated(tasks: Command, pools: Path) -> None:
    task = pools / "repair-0" / "tasks" / "repair-0-train-0000"
    (task / "solution").rename(pools / "away")
    assert tasks("show", str(task))
    with pytest.raises(UserError, match=r"has no reference fix: .*no solve.sh"):
        tasks("show", str(task), "--solution")
    with pytest.raises(UserError, match=r"cannot be validated: .*solve.sh is missing"):
        tasks("validate", str(task))


@pytest.mark.parametrize("jobs", ["0", "-2", "many"])
def test_jobs_are_counted_from_one(tasks: Command, jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tasks("validate", "repair-0", "--jobs", jobs)
    assert caught.value.code == 2 and "argument --jobs" in capsys.readouterr().err

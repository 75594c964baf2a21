"""What is told of a trial while it goes, and at its end."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from legorl.errors import SandboxStartError, UserError
from legorl.policy.template import CALL_END, CALL_START
from legorl.policy.written import WrittenCalls
from legorl.trial import commands
from legorl.trial.runner import TrialRequest
from legorl.trial.story import Story, conclusion, short
from tests.fakes import SUBMIT
from tests.trial.tasks_for_tests import make_task
from tests.trial.test_runner import FIX, WRONG, bench  # noqa: F401 - a fixture


async def tell(made, root: Path) -> list[str]:  # type: ignore[no-untyped-def]
    lines: list[str] = []
    request = TrialRequest(make_task(root / "task"), "t1", "g", 0, "train")
    result = await made.runner.run(request, Story(lines.append))
    return [*lines, *conclusion(result.record, root / "run")]


async def test_the_whole_story(bench, tmp_path: Path) -> None:  # type: ignore[no-untyped-def] # noqa: F811
    made = bench([WRONG, FIX, SUBMIT])
    made.provider.fail_starts = [SandboxStartError("no room")]
    lines = await tell(made, tmp_path)
    words = [line.split(" s  ", 1)[-1].strip() for line in lines]
    assert words[:4] == [
        "setup",
        "setup failed [sandbox_start]: no room Once more.",
        "setup, attempt 2",
        words[3],
    ]
    assert words[3].startswith("setup done (")
    said = [line for line in words if line.startswith(("1 ", "2 ", "3 "))]
    assert said == [f"1  bash {WRONG}", f"2  bash {FIX}", f"3  bash {SUBMIT}"]
    assert words[words.index(said[1]) + 1] == "4 passed"
    assert any(line.startswith("agent ended: submitted (") for line in words)
    assert any(line.startswith("verify done (") for line in words)
    assert any(line.startswith("reward 1: submitted (3 turns") for line in lines)
    assert f"look:   legorl trial show {tmp_path}/run/trials/step_0000/t1" in lines


async def test_what_failed_is_named(bench, tmp_path: Path) -> None:  # type: ignore[no-untyped-def] # noqa: F811
    lines = await tell(bench([WRONG, SUBMIT]), tmp_path)
    assert any(line.startswith("reward 0: submitted") for line in lines)
    assert {"failed: low: no", "failed: same: no"} <= set(lines)
    lines = await tell(bench([SUBMIT], faults={"start": SandboxStartError("no room")}), tmp_path)
    assert (
        any(line.startswith("not graded: sandbox_start, excluded") for line in lines) and "no room" in lines
    )


def test_long_texts_are_cut_in_the_middle() -> None:
    assert short("one\ntwo\n") == "one ⏎ two"
    cut = short("a" * 500 + "z")
    assert len(cut) < 110 and cut.startswith("aaa") and cut.endswith("z") and " … " in cut


def test_written_calls_come_back() -> None:
    text = f'{CALL_START}\n{{"name": "bash", "arguments": {{"command": "echo ü"}}}}\n{CALL_END}'
    parsed = WrittenCalls().parse("First. " + text)
    assert (parsed.text, parsed.calls[0].name) == ("First.", "bash") and "ü" in parsed.calls[0].arguments
    assert WrittenCalls().parse(f"{CALL_START}\n[1]\n{CALL_END}").calls == ()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["TASK"], "Say who acts"),
        (["TASK", "--engine-url", "http://127.0.0.1:1"], "needs --model DIR"),
        (["TASK", "--model", "/nowhere"], "/nowhere is no model"),
        (["TASK", "sandbox=nowhere", "--expert"], "nowhere"),
        (["no-such-task", "--expert"], "There is no task pool|has no task"),
    ],
)
def test_mistakes_at_the_keyboard(argv: list[str], words: str, tmp_path: Path) -> None:
    make_task(tmp_path)
    (tmp_path / "instruction.md").write_text("x")
    (tmp_path / "task.toml").write_text(TOML)
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers())
    argv = [str(tmp_path) if word == "TASK" else word for word in argv]
    with pytest.raises(UserError, match=words):
        commands.run(parser.parse_args(["trial", "run", *argv, "--out", str(tmp_path / "out")]))


TOML = """
[metadata.legorl]
id = "check_age"
split = "train"
source = "synthetic"
module = "shop.cart"
test_command = "python check.py"
pass_pattern = "passed"
hidden_tests = ["low", "same", "high"]

[verifier]
timeout_sec = 20
"""

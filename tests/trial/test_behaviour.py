"""Behaviour is read from calls and results, the same for every harness."""

from __future__ import annotations

import pytest

from legorl.trial.behaviour import Step, behaviour

TEST = "python check.py"
PASS = r"(?m)^\d+ passed$"
RED = "E assert f(3, 4) == True got False\n2 failed, 2 passed\n"
GREEN = "4 passed\n"
SED = "sed -i -E '2s@ [-+*/%<>=!]+ @ >= @' shop/cart.py"


def bash(command: str, result: str = "") -> Step:
    return Step("bash", {"command": command}, result)


def of(*steps: Step, submitted: bool = True):  # type: ignore[no-untyped-def]
    return behaviour(steps, test_command=TEST, pass_pattern=PASS, submitted=submitted)


def test_retry_until_green() -> None:
    got = of(bash(f"{SED} && {TEST}", RED), bash(SED), bash(TEST, RED), bash(f"{SED} && {TEST}", GREEN))
    assert (got.edits, got.tests_run, got.retries) == (3, 3, 2)
    assert got.green_before_end and got.test_after_last_edit and got.submitted_on_green


def test_a_word_before_the_output() -> None:
    shown = f"Command: {TEST}\nDirectory: (root)\nOutput: 4 passed\nError: (none)\nExit Code: 0"
    assert of(Step("run_shell_command", {"command": f"{SED} && {TEST}"}, shown)).green_before_end


def test_blind_submission() -> None:
    got = of(bash(SED))
    assert (got.edits, got.tests_run) == (1, 0)
    assert got.submitted and not got.submitted_on_green and not got.test_after_last_edit


def test_submission_on_red() -> None:
    got = of(bash(f"{SED} && {TEST}", RED))
    assert got.test_after_last_edit and not got.green_before_end and not got.submitted_on_green


def test_an_edit_after_green_unsettles_it() -> None:
    got = of(bash(f"{SED} && {TEST}", GREEN), bash(SED))
    assert got.green_before_end and not got.test_after_last_edit and not got.submitted_on_green


def test_green_without_submission() -> None:
    assert not of(bash(f"{SED} && {TEST}", GREEN), submitted=False).submitted_on_green


def test_order_within_one_command() -> None:
    assert not of(bash(f"{TEST}; {SED}", GREEN)).test_after_last_edit
    assert of(bash(f"{SED}; {SED}; {TEST}", GREEN)).edits == 1


def test_words_of_the_agent_are_not_a_test_run() -> None:
    got = of(bash("echo '4 passed'", GREEN))
    assert got.tests_run == 0 and not got.green_before_end


@pytest.mark.parametrize(
    "command",
    [
        "sed -i s/a/b/ m.py",
        "sed -E -i 's/a/b/' m.py",
        "cd shop && sed --in-place 's/a/b/' m.py",
        "perl -pi -e 's/a/b/' m.py",
        "cat > m.py <<'EOF'\nx = 1\nEOF",
        "echo 'x = 1' >> m.py",
        "printf x | tee m.py",
        "patch -p1 < fix.diff",
        "git apply fix.diff",
        "git checkout -- m.py",
        "mv a.py b.py",
        "python3 -c \"open('m.py', 'w').write('x')\"",
        "python - <<'EOF'\nfrom pathlib import Path\nPath('m.py').write_text('x')\nEOF",
    ],
)
def test_editing_commands(command: str) -> None:
    assert of(bash(command)).edits == 1


@pytest.mark.parametrize(
    "command",
    [
        "cat shop/cart.py",
        "sed -n '1,20p' shop/cart.py",
        "grep -rn 'a > b' shop",
        'grep -n "age >= limit" shop/cart.py | head',
        "ls -la 2>/dev/null",
        "ls nope 2>&1",
        "git diff > /tmp/d",
        "git log",
        "python -c \"print(open('m.py').read())\"",
        "find . -name '*.py' -exec grep -l x {} +",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ],
)
def test_reading_commands(command: str) -> None:
    assert of(bash(command)).edits == 0


@pytest.mark.parametrize(
    ("tool", "arguments", "edits"),
    [
        ("Edit", {"file_path": "m.py", "old_string": "a", "new_string": "b"}, 1),
        ("write", {"filePath": "m.py", "content": "x"}, 1),
        ("str_replace_editor", {"command": "str_replace", "path": "m.py"}, 1),
        ("str_replace_editor", {"command": "view", "path": "m.py"}, 0),
        ("Read", {"file_path": "m.py"}, 0),
        ("shell", {"command": ["sed", "-i", "s/a/b/", "m.py"]}, 1),
        ("Bash", {}, 0),
    ],
)
def test_tools_of_the_harnesses(tool: str, arguments: dict[str, object], edits: int) -> None:
    assert of(Step(tool, arguments)).edits == edits

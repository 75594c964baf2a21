"""Task directories that were made elsewhere, for Harbor alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.errors import UserError
from legorl.tasks.reward import stated_reward
from legorl.tasks.task import load_task

TOML = """schema_version = "1.4"
[task]
name = "acme/Fix the age check!"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 90
[environment]
docker_image = "registry.invalid/python:3.12"
"""


OWN = """[metadata.legorl]
id = "own"
split = "train"
source = "x"
module = "m"
test_command = "true"
pass_pattern = "ok"
hidden_tests = ["a"]
"""


def write(root: Path, toml: str = TOML) -> Path:
    for name, text in {
        "task.toml": toml,
        "instruction.md": "Fix it.",
        "environment/Dockerfile": "FROM python:3.12\n",
        "environment/app.py": "x = 1\n",
        "tests/test.sh": "echo 1 >/logs/verifier/reward.txt\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_its_name_and_defaults(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "t"))
    assert (task.id, task.source, task.split) == ("Fix-the-age-check-", "acme", "train")
    assert (task.hidden_tests, task.test_command, task.verify_timeout_s) == ((), "", 90.0)
    assert task.image == "registry.invalid/python:3.12"
    assert task.workspace == tmp_path / "t" / "environment"
    (tmp_path / "t" / "environment" / "repo").mkdir()
    assert task.workspace.name == "repo"


def test_without_a_name_its_directory_names_it(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "age_check", "[metadata]\n"))
    assert (task.id, task.source, task.verify_timeout_s, task.image) == ("age_check", "harbor", 600.0, "")


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("metadata = 3\n", "wrong type"),
        ("task = [1]\n", "wrong type"),
        ("environment = 3\n", "wrong type"),
        ("[metadata.legorl]\nid = 'x'\n", "lacks the field 'split'"),
        ("[verifier]\ntimeout_sec = inf\n", "no number of seconds"),
        ("[verifier]\ntimeout_sec = '9'\n", "timeout_sec is '9' and not a number"),
        ("[[broken", "not valid TOML"),
        (OWN.replace('["a"]', '"a"'), "hidden_tests is 'a' and not a list of texts"),
        (OWN.replace('["a"]', "[1]"), r"hidden_tests is \[1\] and not a list of texts"),
        (OWN.replace('"own"', "3"), "id is 3 and not a text"),
        (OWN.replace('"own"', '"../own"'), "id='../own' can name no directory"),
        (OWN.replace('"own"', '"/etc"'), "id='/etc' can name no directory"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, toml: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_task(write(tmp_path / "t", toml))


def test_missing_tests_are_named(tmp_path: Path) -> None:
    (write(tmp_path / "t") / "tests" / "test.sh").unlink()
    with pytest.raises(UserError, match=r"tests/test\.sh is missing"):
        load_task(tmp_path / "t")


@pytest.mark.parametrize("part", ["environment", "tests", "tests/test.sh", "solution", "instruction.md"])
def test_a_part_that_leads_elsewhere_is_refused(tmp_path: Path, part: str) -> None:
    root, secret = write(tmp_path / "t"), tmp_path / "secret"
    (root / "solution").mkdir()
    (root / part).rename(secret)
    (root / part).symlink_to(secret)
    with pytest.raises(UserError, match=f"{part} leads out of it"):
        load_task(root)


@pytest.mark.parametrize(
    ("text", "json_text", "reward"),
    [
        ("1\n", "", 1.0),
        ("0.5", "", 0.5),
        ("", "", None),
        ("nan", "", None),
        ("1e400", "", None),
        ("-0.1", "", None),
        ("NaN", "", None),
        ("inf", "", None),
        ("1e999", "", None),
        ("1 1", "", None),
        ("2.0", "", None),
        ("", '{"reward": NaN}', None),
        ("", '{"reward": 1e999}', None),
        ("0", '{"reward": 1}', 1.0),
        ("", '{"a": 0, "b": 1}', 0.5),
        ("1", '{"a": 2}', None),
        ("1", '{"a": "1"}', None),
        ("1", "{}", None),
        ("1", "[1]", None),
        ("1", '{"reward": true}', None),
        ("1", "{", None),
    ],
)
def test_rewards(text: str, json_text: str, reward: float | None) -> None:
    assert stated_reward(text, json_text) == reward

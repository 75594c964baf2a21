"""Installation: atomic, verified, idempotent, one at a time; with a runtime that needs no registry."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import legorl
from legorl.errors import UserError
from legorl.harness import commands
from legorl.harness.fetch import find_python, run_tool
from legorl.harness.install import MANIFEST, Runtime, install, locate
from tests.harness.page import use_example

CONTENT = b"#!/bin/sh\necho agent\n"


def write_agent(target: Path) -> None:
    (target / "lib").mkdir()
    (target / "lib" / "data").write_text("data")
    (target / "agent").write_bytes(CONTENT)
    (target / "agent").chmod(0o700)


def runtime(build: Callable[[Path], None] = write_agent) -> Runtime:
    return Runtime("toy", "1.0", "agent", hashlib.sha256(CONTENT).hexdigest(), build)


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "harness").iterdir() if not path.name.endswith(".lock")]


def test_installs_once_and_read_only(tmp_path: Path) -> None:
    target = install(runtime(), tmp_path)
    assert target == tmp_path / "harness" / "toy-1.0"
    manifest = json.loads((target / MANIFEST).read_text())
    assert manifest["files"] == 2
    assert manifest["bytes"] == len(CONTENT) + 4
    assert (target / "agent").stat().st_mode & 0o777 == 0o555
    assert (target / "lib" / "data").stat().st_mode & 0o777 == 0o444
    made = target.stat().st_ino

    def never(_: Path) -> None:
        raise AssertionError("built twice")

    assert install(runtime(never), tmp_path).stat().st_ino == made
    assert locate(runtime(), tmp_path) == target


def test_not_installed_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"legorl harness install toy --cache {tmp_path}"):
        locate(runtime(), tmp_path)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def half(target: Path) -> None:
        write_agent(target)
        raise UserError("the registry is down")

    with pytest.raises(UserError, match="the registry is down"):
        install(runtime(half), tmp_path)
    assert leftovers(tmp_path) == []


def test_other_content_than_the_pinned_is_refused(tmp_path: Path) -> None:
    def forged(target: Path) -> None:
        (target / "agent").write_bytes(b"other")

    with pytest.raises(UserError, match="pinned is"):
        install(runtime(forged), tmp_path)
    assert leftovers(tmp_path) == []


def test_damage_is_noticed(tmp_path: Path) -> None:
    target = install(runtime(), tmp_path)
    (target / "agent").chmod(0o755)
    (target / "agent").write_bytes(CONTENT.replace(b"agent", b"spyng"))
    with pytest.raises(UserError, match=f"Remove {target}"):
        install(runtime(), tmp_path)
    (target / "agent").unlink()
    with pytest.raises(UserError, match="holds 1 files"):
        install(runtime(), tmp_path)


def _install_slowly(cache: Path, log: Path) -> None:
    def slow(target: Path) -> None:
        with log.open("a") as stream:
            stream.write("built\n")
        time.sleep(0.3)
        write_agent(target)

    install(runtime(slow), cache)


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    def killed(target: Path) -> None:
        write_agent(target)
        os.kill(os.getpid(), signal.SIGKILL)

    context = multiprocessing.get_context("fork")
    process = context.Process(target=install, args=(runtime(killed), tmp_path))
    process.start()
    process.join(20)
    assert len(leftovers(tmp_path)) == 1
    other = tmp_path / "harness" / ".toy-1.0.1.abcdefgh"  # of another version, built under another lock
    other.mkdir()
    install(runtime(), tmp_path)
    assert sorted(leftovers(tmp_path)) == [other.name, "toy-1.0"]


def test_two_processes_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [context.Process(target=_install_slowly, args=(tmp_path, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "built\n"


def test_a_tool_s_failure_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`sh -c .*` failed with exit code 3:\nno such package"):
        run_tool(("sh", "-c", "echo no such package >&2; exit 3"), cwd=tmp_path)
    with pytest.raises(UserError, match="`no-such-npm` is needed"):
        run_tool(("no-such-npm", "install"), cwd=tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(UserError, match="could not be installed"):
        install(runtime(), tmp_path)


def test_a_cache_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match="could not be installed"):
        install(runtime(), tmp_path / "cache")


def run_command(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers())
    args = parser.parse_args(["harness", *argv])
    return int(args.run(args))


def test_the_command_lists_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("list", "--cache", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["mini_swe_agent", "2.4.6", "openai_chat"],
        ["claude_code", "2.1.332", "anthropic"],
        ["opencode", "1.18.33", "openai_chat"],
        ["openhands", "1.58.2", "openai_chat"],
        ["codex", "0.171.0", "openai_responses"],
        ["qwen_code", "0.24.4", "openai_chat"],
    ]
    assert all(line.endswith("not installed") for line in lines)


def test_the_list_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "harness" / "codex-0.171.0"
    place.mkdir(parents=True)
    (place / MANIFEST).write_text("{}")
    assert run_command("list", "--json", "--cache", str(tmp_path)) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert len(listed) == 6
    assert listed["codex"]["path"] == str(place)
    assert listed["claude_code"] == {
        "name": "claude_code", "version": "2.1.332", "wire": "anthropic", "path": None
    }  # fmt: skip


def test_the_command_refuses_unknown_names_before_it_installs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean opencode"):
        run_command("install", "mini_swe_agent", "open_code", "--cache", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_one_s_own_harness_is_installed_by_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_example(tmp_path, monkeypatch)
    assert run_command("install", "tiny.adapter:Tiny", "--cache", str(tmp_path / "cache")) == 0
    assert capsys.readouterr().out == f"tiny 1: {tmp_path}/tiny/agent.py\n"


def test_one_that_cannot_be_installed_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_example(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="`npm` is needed to install this harness"):
        run_command("install", "codex", "tiny.adapter:Tiny", "--cache", str(tmp_path / "cache"))
    assert capsys.readouterr().out.startswith("tiny 1: ")


def test_a_python_that_runs_is_found_and_one_that_is_not_there_is_told() -> None:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert find_python(running) == Path(sys.base_prefix) / "bin" / f"python{running}"
    with pytest.raises(UserError, match=r"Python 3\.99 is needed.*apt-get install python3\.99"):
        find_python("3.99")


def test_a_shim_leads_to_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv puts a script on the PATH for every version it has, which runs for the chosen ones only."""
    root = tmp_path / "pyenv"
    prefix = root / "versions" / "3.98.1"
    for path, script in (
        (root / "shims" / "python3.98", "echo 'not chosen' >&2; exit 127"),
        (prefix / "bin" / "python3.98", f"echo {prefix}"),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{root / 'shims'}:/usr/bin:/bin")
    assert find_python("3.98") == prefix / "bin" / "python3.98"


def test_a_lock_pins_every_file_by_hash() -> None:
    text = (Path(legorl.__file__).parent / "harness" / "openhands.lock").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) > 100
    assert all(re.match(r"[\w.-]+==\S+ \\\n    --hash=sha256:", entry) for entry in entries)
    assert any(entry.startswith("openhands-sdk==1.58.2 ") for entry in entries)

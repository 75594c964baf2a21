"""Installation: atomic, verified, idempotent, one at a time; with a runtime that needs no registry."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from legorl.errors import UserError
from legorl.harness import commands
from legorl.harness.install import MANIFEST, Runtime, install, locate, run_tool

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
    assert [line.split()[:2] for line in lines] == [
        ["mini_swe_agent", "2.4.6"],
        ["claude_code", "2.1.332"],
        ["opencode", "1.18.33"],
    ]
    assert all(line.endswith("not installed") for line in lines)


def test_the_command_refuses_unknown_names_before_it_installs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean opencode"):
        run_command("install", "mini_swe_agent", "open_code", "--cache", str(tmp_path))
    assert list(tmp_path.iterdir()) == []

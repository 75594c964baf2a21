"""Tasks by running them: grading of honest and hostile repositories, validation, building of pools."""

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from legorl.errors import UserError
from legorl.tasks import isolate, limits, repair
from legorl.tasks.draft import Draft, write_task
from legorl.tasks.grader import SUITE
from legorl.tasks.pool import load_pool
from legorl.tasks.synth import synth
from legorl.tasks.task import load_task
from legorl.tasks.validate import validate_pool, validate_task

pytestmark = pytest.mark.integration


@pytest.fixture
def draft() -> Draft:
    return repair.make(0, "train", 0)


def grade(
    draft: Draft, directory: Path, files: Mapping[str, str], command: str = "bash /tests/test.sh"
) -> tuple[dict[str, list[str] | dict[str, str]], str]:
    """result.json and reward.txt for the task's repository with these files written into it."""
    task, out, changes = directory / "task", directory / "out", directory / "changes"
    write_task(draft, task)
    out.mkdir()
    changes.mkdir()
    for name, text in files.items():
        (changes / name).parent.mkdir(parents=True, exist_ok=True)
        (changes / name).write_text(text)
    script = f"""
        mkdir /logs/verifier
        cp -r /task/environment/repo/. /changes/. . && {command} && cp /logs/verifier/* /out/
    """
    read_only = {"/task": task, "/tests": task / "tests", "/changes": changes}
    done = isolate.run(script, read_only=read_only, writable={"/out": out}, timeout_s=60)
    assert (done.code, done.timed_out) == (0, False), done.output
    return json.loads((out / "result.json").read_text()), (out / "reward.txt").read_text()


def test_reward_follows_the_repository(draft: Draft, tmp_path: Path) -> None:
    path, good = draft.fixed
    (tmp_path / "a").mkdir()
    result, reward = grade(draft, tmp_path / "a", {})
    assert reward == "0\n"
    assert result["failed"]
    assert set(result["passed"]) | set(result["failed"]) == set(draft.hidden_tests)
    (tmp_path / "b").mkdir()
    result, reward = grade(draft, tmp_path / "b", {path: good})
    assert reward == "1\n"
    assert set(result["passed"]) == set(draft.hidden_tests)
    assert result["failed"] == {}


SHADOW = "raise SystemExit('shadowed')\n"


def test_no_file_of_the_repository_shadows_the_grader(draft: Draft, tmp_path: Path) -> None:
    names = [
        "unittest",
        "json",
        "os",
        "select",
        "traceback",
        "test_hidden",
        "run_hidden",
        "sitecustomize",
        "usercustomize",
    ]
    files = {f"{name}.py": SHADOW for name in names} | {draft.fixed[0]: draft.fixed[1]}
    assert grade(draft, tmp_path, files)[1] == "1\n"


FORGE = """
import json, os
os.makedirs("/logs/verifier", exist_ok=True)
open("/logs/verifier/reward.txt", "w").write("1")
passed = open("/tests/required.txt").read().split()
open("/logs/verifier/result.json", "w").write(json.dumps({"passed": passed, "failed": {}}))
os._exit(0)
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (FORGE, "without a verdict"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "without a verdict"),
        (
            "import os\nif os.fork():\n    os._exit(0)\nos.setsid()\nwhile True: pass",
            "not finished after 1 s",
        ),
        ("while True: pass", "not finished after 1 s"),
    ],
)
def test_code_that_ends_or_stalls_the_tests_is_a_failure(
    draft: Draft, tmp_path: Path, code: str, message: str
) -> None:
    command = "python -I -S -B /tests/run_hidden.py 1 /workspace test_hidden"
    result, reward = grade(draft, tmp_path, {draft.fixed[0]: code}, command)
    assert reward == "0\n"
    failed = result["failed"]
    assert isinstance(failed, dict)
    assert message in failed[SUITE]


@pytest.mark.parametrize(
    "code", ["def (", "raise ValueError('no')", "import unittest\nraise unittest.SkipTest", ""]
)
def test_code_that_cannot_be_imported_is_a_failure(draft: Draft, tmp_path: Path, code: str) -> None:
    result, reward = grade(draft, tmp_path, {draft.fixed[0]: code})
    assert (result["passed"], reward) == ([], "0\n")


def test_bytecode_in_the_repository_is_not_executed(draft: Draft, tmp_path: Path) -> None:
    """Bytecode of the fixed module under the unfixed source, marked as never to be checked."""
    path = draft.fixed[0]
    tag, module = sys.implementation.cache_tag, path.removesuffix(".py").replace("/", ".")
    name = f"{Path(path).parent}/__pycache__/{Path(path).stem}.{tag}.pyc"
    plant = f"""python - <<'END'
import py_compile
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
py_compile.compile("good.py", cfile="{name}", invalidation_mode=mode)
END
python -c 'import {module}; assert {module}.planted' && bash /tests/test.sh"""
    result, reward = grade(draft, tmp_path, {"good.py": draft.fixed[1] + "planted = True\n"}, plant)
    assert reward == "0\n"
    assert result["failed"]


def test_the_cell_has_no_network_and_a_read_only_host(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    probe = "tail -n +3 /proc/net/dev | cut -d: -f1; touch /usr/x /in/x"
    done = isolate.run(probe, read_only={"/in": tmp_path / "in"}, writable={}, timeout_s=20)
    interfaces, *touched = done.output.strip().split("\n")
    assert interfaces.strip() == "lo"
    assert ["Read-only file system" in line for line in touched] == [True, True]


def alive(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found


def until_gone(mark: str) -> list[str]:
    deadline = time.monotonic() + 10
    while (left := alive(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_a_deadline_ends_everything_that_was_started() -> None:
    start = time.monotonic()
    done = isolate.run("setsid sleep 98761 & sleep 98761", read_only={}, writable={}, timeout_s=0.5)
    assert done.timed_out
    assert time.monotonic() - start < 10
    assert until_gone("98761") == []


def test_a_missing_bwrap_is_named_with_its_package(
    draft: Draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(draft, tmp_path / "task")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        validate_task(load_task(tmp_path / "task"))


def screened(draft: Draft, directory: Path) -> str:
    write_task(draft, directory)
    screening = validate_task(load_task(directory))
    assert screening.ok == (screening.reason == "")
    return screening.reason


def test_validation_tells_what_does_not_hold(draft: Draft, tmp_path: Path) -> None:
    path, good = draft.fixed
    assert screened(draft, tmp_path / "ok") == ""
    no_fix = dataclasses.replace(draft, fixed=(path, draft.repo[path] + "\n"))
    assert "passes_with_fix, visible_green_with_fix" in screened(no_fix, tmp_path / "a")
    no_defect = dataclasses.replace(draft, repo={**draft.repo, path: good + "\n"})
    assert "fails_without_fix, visible_red_without_fix" in screened(no_defect, tmp_path / "b")
    wrong_pattern = dataclasses.replace(draft, pass_pattern="never")
    assert screened(wrong_pattern, tmp_path / "c").endswith("does not hold: visible_green_with_fix")
    flaky = draft.tests["test_hidden.py"].replace(
        "(got, want)\n", "(got, want)\n        import random; random.randrange(9) or 1/0\n", 1
    )
    assert screened(dataclasses.replace(draft, tests={"test_hidden.py": flaky}), tmp_path / "d") != ""
    write_task(draft, tmp_path / "e")
    (tmp_path / "e" / "solution" / "fix.patch").write_text("no patch")
    assert "exit status 90" in validate_task(load_task(tmp_path / "e")).reason


@pytest.mark.parametrize("result", ["no json", "[]", "{}", '{"passed": 3, "failed": {}}'])
def test_a_verifier_without_a_readable_result_does_not_hold(
    draft: Draft, tmp_path: Path, result: str
) -> None:
    write_task(draft, tmp_path / "task")
    (tmp_path / "task" / "tests" / "test.sh").write_text(
        f"mkdir -p /logs/verifier; cd /logs/verifier; echo '{result}' >result.json; echo 1 >reward.txt\n"
    )
    screening = validate_task(load_task(tmp_path / "task"))
    assert not screening.ok and "left no readable result.json" in screening.reason


def test_output_without_end_does_not_fill_the_disk(
    draft: Draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legorl.tasks.validate.FILE_KB", 64)
    write_task(dataclasses.replace(draft, test_command="yes"), tmp_path / "task")
    started = time.monotonic()
    screening = validate_task(load_task(tmp_path / "task"))
    assert not screening.ok and "visible_green_with_fix" in screening.reason
    assert time.monotonic() - started < 30  # ended by the size and not by the deadline


@pytest.mark.parametrize(
    "bomb",
    [
        "python -c 'x = bytearray(1 << 33)'",
        "head -c 4G /dev/zero >/tmp/full",
        'python -c \'import subprocess as s; [s.Popen(["sleep", "9"]) for _ in range(400)]\'',
    ],
)
def test_a_cell_s_memory_and_processes_are_limited(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEMORY_MB", 128)
    monkeypatch.setattr(limits, "PROCESSES", 64)
    if limits._hierarchy() is None:
        pytest.skip("no control groups here")
    done = isolate.run(f"bash -c {shlex.quote(bomb)}; echo code $?", read_only={}, timeout_s=60)
    unavailable = "Resource temporarily unavailable" in done.output
    assert done.code == 137 or "code 137" in done.output or unavailable, done


def test_a_plain_harbor_task_is_validated(tmp_path: Path) -> None:
    task = tmp_path / "t"
    for name, text in {
        "task.toml": '[task]\nname = "acme/one"\n[verifier]\ntimeout_sec = 20\n',
        "instruction.md": "Make x 2.",
        "environment/Dockerfile": "FROM scratch\n",
        "environment/app.py": "x = 1\n",
        "tests/test.sh": "mkdir -p /logs/verifier; grep -c 2 /workspace/app.py >/logs/verifier/reward.txt\n",
        "solution/solve.sh": "echo x = 2 >/workspace/app.py\n",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    assert validate_task(load_task(task)).ok
    (task / "solution/solve.sh").write_text("true\n")
    assert "does not hold: passes_with_fix" in validate_task(load_task(task)).reason


def test_a_killed_validation_leaves_nothing(draft: Draft, tmp_path: Path) -> None:
    write_task(dataclasses.replace(draft, test_command="sleep 555"), tmp_path / "task")
    (tmp_path / "tmp").mkdir()
    argv = [sys.executable, "-m", "legorl.cli", "tasks", "validate", str(tmp_path / "task")]
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen(argv, env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not alive("sleep 555"):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert until_gone("sleep 555") == []
    assert list((tmp_path / "tmp").iterdir()) == []
    groups = limits._hierarchy()
    if groups is not None:  # the next one that validates, or starts a sandbox, takes the empty groups away
        groups.reap()


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): (file.stat().st_mode, file.read_bytes()) for file in files}


def test_the_same_request_gives_the_same_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    first = synth("repair", 7, 3, 2, tmp_path / "a", progress=lambda *done: seen.append(done))
    assert seen == [(n, 5) for n in range(1, 6)]
    synth("repair", 7, 3, 2, tmp_path / "b", jobs=1)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert [len(first.tasks(split)) for split in ("train", "heldout")] == [3, 2]
    assert all(screening.ok for screening in validate_pool(first))


def test_a_killed_build_leaves_nothing_that_counts(tmp_path: Path) -> None:
    out = tmp_path / "pool"
    code = "import pathlib, sys; from legorl.tasks.synth import synth"
    code += "; synth('repair', 0, 200, 50, pathlib.Path(sys.argv[1]))"
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", code, str(out)], cwd=root, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not alive(str(tmp_path / ".pool-")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert until_gone(str(tmp_path)) == []
    with pytest.raises(UserError, match="no task pool"):
        load_pool(out)
    assert list(tmp_path.glob(".pool-*"))
    synth("repair", 0, 1, 1, out)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_packages(tmp_path: Path) -> None:
    pool = synth("repair_real", 0, 2, 2, tmp_path / "pool")
    assert len({entry.repository for entry in pool.entries}) == 4
    for task in (*pool.tasks("train"), *pool.tasks("heldout")):
        failing = task.metadata["failing"].split()
        assert set(failing) <= set(task.hidden_tests)
        assert failing[0] in task.instruction
        assert any(path.name.startswith("LICEN") for path in task.workspace.iterdir())

"""Run directories are unique, found by name, and never look alive when they are not."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from legorl.config import rundir
from legorl.errors import UserError


def run(runs: Path, name: str) -> Path:
    path = runs / name
    path.mkdir(parents=True)
    rundir.write_info(path, rundir.RunInfo(id=name, steps=2, created=time.time()))
    return path


def test_directories_made_at_once_differ(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: rundir.new_run_dir(tmp_path / "runs"), range(200)))
    assert len(set(made)) == 200


def test_lock_tells_running_from_killed(tmp_path: Path) -> None:
    path = run(tmp_path, "a")
    assert rundir.live_info(path).state == "killed"
    with rundir.lock(path):
        assert rundir.live_info(path).state == "running"
        with pytest.raises(UserError, match="in use"), rundir.lock(path):
            pass
    rundir.end_run(path, "failed", "because")
    info = rundir.live_info(path)
    assert (info.state, info.reason) == ("failed", "because")


def test_lock_is_free_when_its_holder_is_killed(tmp_path: Path) -> None:
    path = run(tmp_path, "a")
    code = (
        "import sys, time; from pathlib import Path; from legorl.config import rundir\n"
        "with rundir.lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert rundir.is_locked(path)
        holder.kill()
    assert not rundir.is_locked(path)


def test_find(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs"):
        rundir.find_run(tmp_path, "last")
    first, second = run(tmp_path, "20260101-000000-aaaa"), run(tmp_path, "20260102-000000-bbbb")
    assert rundir.list_runs(tmp_path) == [second, first]
    assert rundir.find_run(tmp_path, "last") == second
    assert rundir.find_run(tmp_path, "20260101") == first
    assert rundir.find_run(tmp_path, str(first)) == first
    with pytest.raises(UserError, match="begins several"):
        rundir.find_run(tmp_path, "2026")
    with pytest.raises(UserError, match=r"no run '20260101-000000-aaab'.*Near: 20260101-000000-aaaa"):
        rundir.find_run(tmp_path, "20260101-000000-aaab")


def test_a_path_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/nope is no run directory: it does not exist"):
        rundir.find_run(tmp_path / "runs", f"{tmp_path}/nope")
    with pytest.raises(UserError, match=rf"{tmp_path} is no run directory: it has no {rundir.INFO_FILE}"):
        rundir.find_run(tmp_path / "runs", str(tmp_path))


def test_a_broken_description_is_named(tmp_path: Path) -> None:
    path = run(tmp_path, "a")
    (path / "run.json").write_text("{")
    with pytest.raises(UserError, match="not a run description"):
        rundir.read_info(path)

"""Two steps with every choice that `conf/` offers, and what a user sees of them."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from legorl.trial.record import read_record
from tests.e2e.conftest import Program

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def check(run: dict[str, Any], directory: Path, *, trials: int = 16) -> list[Path]:
    """What every finished smoke run must show; returns its trial directories."""
    assert (run["state"], run["step"], run["steps"]) == ("finished", 2, 2)
    assert run["heldout"]["n"] > 0
    assert 0 <= run["heldout"]["last"] <= 1
    assert run["alignment"]["mean_abs"] < 0.2
    found = [file.parent for file in (directory / run["path"] / "trials").glob("*/*/trial.json")]
    records = [read_record(trial) for trial in found]
    assert sum(run["terminations"].values()) == len(records) == trials
    assert not [record.violations for record in records if record.violations]
    assert run["excluded"] == sum(record.excluded for record in records)
    return found


def test_two_harnesses_in_a_sweep_can_be_compared(program: Program) -> None:
    done = program.run("train", "-m", "experiment=smoke", "harness=mini_swe_agent,claude_code", timeout_s=800)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    runs = program.status()
    assert len(runs) == 2
    for run in runs:
        trials = check(run, program.directory)
        assert run["excluded"] == 0, run["terminations"]
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{program.directory / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("legorl")
    assert experiment is not None
    logged = client.search_runs([experiment.experiment_id])
    assert {entry.data.params["harness.name"] for entry in logged} == {"mini_swe_agent", "claude_code"}
    assert len({entry.data.tags["legorl.sweep"] for entry in logged}) == 1
    for entry in logged:
        assert entry.info.status == "FINISHED"
        assert [m.step for m in client.get_metric_history(entry.info.run_id, "reward/mean")] == [1, 2]

    shown = program.run("show", "last", timeout_s=60)
    assert shown.returncode == 0, shown.stderr
    assert "terminations" in shown.stdout
    assert "example trials" in shown.stdout
    for command in (("trial", "show", str(trials[0])), ("trial", "check", str(trials[0]))):
        looked = program.run(*command, timeout_s=60)
        assert looked.returncode == 0, f"{looked.stdout}\n{looked.stderr}"


def test_opencode(program: Program) -> None:
    """Its start costs seconds of processor time, so these are few trials."""
    few = ("run.heldout_tasks=2", "algo.tasks_per_step=1", "algo.minibatches=1")
    check(program.train("harness=opencode", *few), program.directory, trials=8)


def test_grpo_without_a_filter_beside_other_servers(program: Program) -> None:
    """The ports that Ray, vLLM, torch and MLflow like best are taken."""
    with contextlib.ExitStack() as stack:
        for port in (5000, 6379, 8000, 8265, 10001, 29500):
            taken = stack.enter_context(socket.socket())
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("0.0.0.0", port))
            taken.listen()
        check(program.train("algo=grpo", "filter=none"), program.directory)


def test_a_dense_policy(program: Program) -> None:
    check(program.train("model=tiny_dense"), program.directory)


def test_the_asynchronous_schedule(program: Program) -> None:
    run = program.train("schedule=async")
    assert (run["state"], run["step"]) == ("finished", 2)
    # Sampling runs ahead of the last update: more trials than the two steps used.
    assert sum(run["terminations"].values()) >= 16

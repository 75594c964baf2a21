"""MLflow with a real sqlite store: two runs, a resume, a killed job."""

from __future__ import annotations

import dataclasses
import multiprocessing
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from legorl.config import rundir
from legorl.config.compose import compose
from legorl.config.resolved import save_config
from legorl.errors import InfrastructureError, UserError
from legorl.tracking import mlflow as tracking

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run area with a store, made once as the launcher does."""
    path = tmp_path_factory.mktemp("runs")
    tracking.create_store(compose([f"paths.runs={path}"]))
    tracking.create_store(compose([f"paths.runs={path}"]))  # the second run finds it
    return path


def make_run(runs: Path, *overrides: str) -> Path:
    config = compose([f"paths.runs={runs}", "experiment=smoke", *overrides])
    run_dir = rundir.new_run_dir(runs)
    info = rundir.RunInfo(
        id=run_dir.name, steps=2, created=time.time(), name="smoke", choices={"algo": "gspo"}
    )
    info = dataclasses.replace(info, mlflow_run=tracking.create_run(config, info))
    rundir.write_info(run_dir, info)
    save_config(config, run_dir)
    return run_dir


def entry(runs: Path, run_dir: Path) -> tuple[Any, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{runs}/mlflow.db")
    return client, client.get_run(rundir.read_info(run_dir).mlflow_run)


def test_a_run_and_its_resume(runs: Path) -> None:
    run_dir = make_run(runs)
    tracker = tracking.Tracker(run_dir)
    tracker.log_heldout(0, {"heldout/success": 0.25, "heldout/n": 4})
    tracker.log_step(1, {"reward/mean": 0.5, "policy/loss": float("nan")})
    tracker.end("failed")
    resumed = tracking.Tracker(run_dir)
    resumed.log_step(1, {"reward/mean": 0.9})  # done again after the resume
    resumed.log_step(2, {"reward/mean": 0.75})
    resumed.log_heldout(2, {"heldout/success": 0.5, "heldout/n": 4})
    resumed.end("finished")

    client, run = entry(runs, run_dir)
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.75)]
    assert run.data.metrics["heldout/success"] == 0.5 and "policy/loss" not in run.data.metrics
    assert run.data.params["harness.name"] == "mini_swe_agent"
    assert run.data.params["model.warm_start.steps"] == "40"
    assert (
        run.data.tags["mlflow.runName"] == f"smoke {run_dir.name}" and run.data.tags["legorl.algo"] == "gspo"
    )
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["config.yaml"]
    assert Path(runs, "mlartifacts").is_dir()


def test_two_runs_are_apart_and_in_one_experiment(runs: Path) -> None:
    first, second = make_run(runs), make_run(runs, "algo=grpo")
    for run_dir, value in ((first, 0.1), (second, 0.2)):
        tracker = tracking.Tracker(run_dir)
        tracker.log_step(1, {"reward/mean": value})
        tracker.end("finished")
    one, two = entry(runs, first)[1], entry(runs, second)[1]
    assert one.info.experiment_id == two.info.experiment_id and one.info.run_id != two.info.run_id
    assert (one.data.metrics["reward/mean"], two.data.metrics["reward/mean"]) == (0.1, 0.2)
    assert (one.data.params["algo.name"], two.data.params["algo.name"]) == ("gspo", "grpo")


def test_the_supervisor_closes_what_the_job_left_open(runs: Path) -> None:
    run_dir = make_run(runs)
    config = compose([f"paths.runs={runs}"])
    run_id = rundir.read_info(run_dir).mlflow_run
    tracking.end_if_running(config, run_id, "killed")
    assert entry(runs, run_dir)[1].info.status == "KILLED"
    tracking.end_if_running(config, run_id, "failed")  # already ended: stays
    assert entry(runs, run_dir)[1].info.status == "KILLED"


def test_a_wrong_metric_name_is_refused(runs: Path) -> None:
    tracker = tracking.Tracker(make_run(runs))
    with pytest.raises(ValueError, match="reward/maen"):
        tracker.log_step(1, {"reward/maen": 0.5})


def test_a_missing_entry_is_an_infrastructure_error(runs: Path) -> None:
    run_dir = make_run(runs)
    rundir.write_info(run_dir, dataclasses.replace(rundir.read_info(run_dir), mlflow_run="0" * 32))
    with pytest.raises(InfrastructureError, match=r"MLflow at sqlite.*failed"):
        tracking.Tracker(run_dir)


def _create(runs: Path) -> None:
    tracking.create_store(compose([f"paths.runs={runs}"]))


def test_two_first_runs_at_once_make_one_store(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_create, args=(tmp_path,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_server_that_is_not_there_is_found_at_once(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: refused
        config = compose([f"paths.runs={tmp_path}", f"tracking.uri=http://127.0.0.1:{held.getsockname()[1]}"])
        started = time.monotonic()
        with pytest.raises(UserError, match="cannot be reached"):
            tracking.create_store(config)
        assert time.monotonic() - started < 12

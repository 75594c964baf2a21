"""MLflow: one run per run, by an explicit id.

Invariants: the store is created (and a database migrated) once, by the launcher, before any job opens it;
a step is logged in one batch, together with the note that it was, so a resumed run repeats nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from legorl.config.resolved import CONFIG_FILE, load_config
from legorl.config.rundir import RunInfo, locked, read_info
from legorl.config.schema import Config
from legorl.config.secrets import resolve_secret
from legorl.errors import InfrastructureError, LegoError, UserError
from legorl.sandbox.providers import configured_policy
from legorl.tracking.metrics import check_names

STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
"""Our end states -> MLflow's."""

_BATCH = 100
"""Parameters per request that MLflow accepts."""


_MIGRATION_S = 180.0
"""Longest wait for another run that makes the database."""


def tracking_uri(config: Config) -> str:
    """`tracking.uri` (a secret in it stays a reference), or sqlite in the run area."""
    return config.tracking.uri or _sqlite(Path(config.paths.runs))


def create_store(config: Config) -> None:
    """Create store and experiment where they do not exist yet. Call it once, before any job.

    Raises:
        UserError: MLflow is not installed, or the store cannot be reached.
    """
    uri = tracking_uri(config)
    _reach(uri)
    artifacts = None
    if not config.tracking.uri:
        runs = Path(config.paths.runs).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        artifacts = (runs / "mlartifacts").as_uri()
    with _alone(uri), _failures(uri, UserError):
        client = _client(uri)
        if client.get_experiment_by_name(config.tracking.experiment) is None:
            client.create_experiment(config.tracking.experiment, artifact_location=artifacts)


@contextlib.contextmanager
def _alone(uri: str) -> Iterator[None]:
    """No second process makes or migrates the same sqlite database: both would end with half of it.

    Raises:
        UserError: another process does for longer than `_MIGRATION_S`.
    """
    path = uri.removeprefix("sqlite:///")
    if path == uri or not path:
        yield
        return
    busy = f"Another process has held {path}.lock for {_MIGRATION_S:g} s."
    with locked(Path(f"{path}.lock"), _MIGRATION_S, busy):
        yield


def create_run(config: Config, info: RunInfo) -> str:
    """Start the run's entry; returns its id, kept in `run.json`. Raises `UserError`."""
    uri, policy = tracking_uri(config), configured_policy(config.sandbox)
    tags = {
        "mlflow.runName": " ".join(filter(None, (info.name, info.id))),
        "legorl.run": info.id,
        "legorl.config_hash": info.config_hash,
        "legorl.sweep": info.sweep,
        "legorl.policy": policy.hash,
        "legorl.policy_off": " ".join(sorted(policy.off)),
        **{f"legorl.{group}": choice for group, choice in info.choices.items()},
    }
    with _failures(uri, UserError):
        client = _client(uri)
        experiment = client.get_experiment_by_name(config.tracking.experiment)
        return str(client.create_run(experiment.experiment_id, tags=tags).info.run_id)


def end_if_running(config: Config, mlflow_run: str, state: str) -> None:
    """For the supervisor: close the entry of a job that could not do it itself."""
    with _failures(tracking_uri(config), InfrastructureError):
        client = _client(tracking_uri(config))
        if client.get_run(mlflow_run).info.status == "RUNNING":
            client.set_terminated(mlflow_run, STATUS[state])


class Tracker:
    """The job's side. Raises `InfrastructureError` when MLflow fails: a run nobody can see must not go on."""

    def __init__(self, run_dir: Path) -> None:
        """Opens the entry that `run.json` names; the first time, logs parameters and `config.yaml`."""
        config = load_config(run_dir)
        # From the run's own directory: a worker may have another working directory than the command line.
        self._uri = config.tracking.uri or _sqlite(run_dir.parent)
        self._run = read_info(run_dir).mlflow_run
        _reach(self._uri)
        with self._failures():
            self._client = _client(self._uri)
            run = self._client.get_run(self._run)
            self._last = {
                series: int(run.data.tags.get(f"legorl.last_{series}", -1)) for series in ("step", "heldout")
            }
            if run.info.status != "RUNNING":
                self._client.update_run(self._run, status="RUNNING")  # resumed
            if not run.data.params:
                self._log_config(config, run_dir)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one training step; a step that was logged before is skipped."""
        self._log("step", step, metrics)

    def log_heldout(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one held-out evaluation, likewise."""
        self._log("heldout", step, metrics)

    def end(self, state: str) -> None:
        """`finished`, `failed` or `killed`."""
        with self._failures():
            self._client.set_terminated(self._run, STATUS[state])

    def _log(self, series: str, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric, RunTag

        check_names(metrics)
        if step <= self._last[series]:
            return
        now = int(time.time() * 1000)
        batch = [Metric(name, value, now, step) for name, value in metrics.items() if math.isfinite(value)]
        with self._failures():
            note = [RunTag(f"legorl.last_{series}", str(step))]
            self._client.log_batch(self._run, metrics=batch, tags=note)
        self._last[series] = step

    def _log_config(self, config: Config, run_dir: Path) -> None:
        from mlflow.entities import Param

        self._client.log_artifact(self._run, str(run_dir / CONFIG_FILE))
        policy = configured_policy(config.sandbox)
        known = {
            "policy.name": policy.name,
            "policy.hash": policy.hash,
            "policy.off": str(sorted(policy.off)),
        }
        values = flatten(dataclasses.asdict(config)) | known
        params = [Param(key, value) for key, value in values.items()]
        for start in range(0, len(params), _BATCH):
            self._client.log_batch(self._run, params=params[start : start + _BATCH])

    def _failures(self) -> contextlib.AbstractContextManager[None]:
        return _failures(self._uri, InfrastructureError)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as text."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)
    return flat


def _sqlite(runs: Path) -> str:
    return f"sqlite:///{runs.resolve() / 'mlflow.db'}"


def _client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # not a page about migrations
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return MlflowClient(resolve_secret(uri))


def _reach(uri: str) -> None:
    """A server that is not there is found out now and not after minutes of MLflow's own retries."""
    parts = urlsplit(resolve_secret(uri))
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"MLflow at {uri} cannot be reached: {error}. Start it, or leave tracking.uri empty for sqlite."
        ) from error


@contextlib.contextmanager
def _failures(uri: str, kind: type[UserError] | type[InfrastructureError]) -> Iterator[None]:
    try:
        yield
    except (LegoError, OSError):
        raise
    except ImportError as error:
        raise UserError("MLflow is not installed: `pip install 'legorl[cpu]'`.") from error
    except Exception as error:  # MLflow's, SQLAlchemy's, alembic's: they have no common class
        if "disk is full" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), uri) from error
        raise kind(
            f"MLflow at {uri} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error

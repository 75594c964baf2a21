"""What a job reads besides its configuration: the pool as verl's data sets, and the starting policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from legorl.config.schema import Config
from legorl.errors import UserError
from legorl.tasks.pool import Pool, load_pool, pool_dir
from legorl.trainer.dataset import write_dataset


def pool_path(config: Config) -> Path:
    """Where the pool that `tasks` names lies: a directory, or a name and seed below `paths.pools`."""
    path = Path(config.tasks.pool)
    if path.is_absolute():
        return path
    return pool_dir(Path(config.paths.pools), config.tasks.pool, config.tasks.seed)


def open_pool(config: Config) -> Pool:
    """The pool that `tasks` names. Raises `UserError` when it is not there."""
    return load_pool(pool_path(config))


def warm_start_config(config: Config) -> Config:
    """The configuration under which the policy is warm-started: always the default harness.

    So runs that differ in their harness start from the same policy, and can be compared.
    """
    from legorl.config.compose import compose

    return dataclasses.replace(config, harness=compose([]).harness)


def starting_policy(config: Config, pool: Pool) -> Path:
    """The policy's directory.

    Raises:
        UserError: it is not there.
    """
    if config.model.path:
        path = Path(config.model.path)
    else:
        from legorl.policy.build import policy_path

        path = policy_path(warm_start_config(config), pool)
    if not (path / "config.json").is_file():
        raise UserError(f"There is no policy in {path}: a Hugging Face directory with config.json is needed.")
    return path.resolve()


def write_inputs(config: Config, run_dir: Path) -> Path:
    """Write verl's data sets into the run directory; returns the policy's directory."""
    pool = open_pool(config)
    train = pool.tasks("train")[: config.tasks.train]
    heldout = pool.tasks("heldout")[: config.run.heldout_tasks]
    write_dataset(train, "train", run_dir / "train.parquet")
    write_dataset(heldout, "heldout", run_dir / "heldout.parquet")
    return starting_policy(config, pool)

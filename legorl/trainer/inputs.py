"""What a job reads besides its configuration: the pool's tasks as verl's data sets, and the starting policy."""

from __future__ import annotations

from pathlib import Path

from legorl.config.schema import Config
from legorl.errors import UserError
from legorl.tasks.pool import Pool, load_pool, pool_dir
from legorl.trainer.dataset import write_dataset


def open_pool(config: Config) -> Pool:
    """The pool that `tasks` names: a path, or a pool of this name and seed below `paths.pools`.

    Raises:
        UserError: it is not there.
    """
    path = Path(config.tasks.pool)
    if not (path.is_absolute() or (path / "pool.json").exists()):
        path = pool_dir(Path(config.paths.pools), config.tasks.pool, config.tasks.seed)
    return load_pool(path)


def starting_policy(config: Config, pool: Pool) -> Path:
    """The policy's directory; the run's own policies must have been built (`legorl.trainer.prepare`).

    Raises:
        UserError: it is not there.
    """
    if config.model.path:
        path = Path(config.model.path)
    else:
        from legorl.policy.build import policy_path

        path = policy_path(config, pool)
    if not (path / "config.json").is_file():
        raise UserError(f"There is no policy in {path}: a Hugging Face directory with config.json is needed.")
    return path.resolve()


def write_inputs(config: Config, run_dir: Path) -> Path:
    """Write verl's data sets into the run directory; returns the policy's directory."""
    pool = open_pool(config)
    train = pool.tasks("train")[: config.tasks.train]
    heldout = pool.tasks("heldout")[: config.run.heldout_tasks]
    write_dataset(train, "train", run_dir / "train.parquet")
    write_dataset(heldout or train[:1], "heldout", run_dir / "heldout.parquet")
    return starting_policy(config, pool)

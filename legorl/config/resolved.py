"""The resolved tree of a run: `config.yaml`, all that a job reads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from legorl.config import store
from legorl.config.compose import to_config
from legorl.config.schema import Config
from legorl.errors import UserError

CONFIG_FILE = "config.yaml"


def to_yaml(config: Config) -> str:
    """The whole tree; secrets as references."""
    store.register()
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def config_hash(config: Config) -> str:
    """Sixteen hex digits of the tree's content; two runs with the same hash were configured alike."""
    canonical = json.dumps(dataclasses.asdict(config), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def save_config(config: Config, run_dir: Path) -> None:
    """Write `config.yaml`; it must not exist yet."""
    with (run_dir / CONFIG_FILE).open("x") as file:
        file.write(to_yaml(config))


def load_config(run_dir: Path) -> Config:
    """Read `config.yaml` back, typed.

    Raises:
        UserError: missing, not YAML, or written by a version with other keys.
    """
    file = run_dir / CONFIG_FILE
    try:
        tree = OmegaConf.load(file)
    except FileNotFoundError:
        raise UserError(f"{run_dir} has no {CONFIG_FILE}: it is no run directory.") from None
    except (YAMLError, OmegaConfBaseException, OSError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from error
    if not isinstance(tree, DictConfig):
        raise UserError(f"{file} holds a list, not a configuration.")
    try:
        return to_config(tree)
    except UserError as error:
        raise UserError(f"{file}: {error} It may have been written by another version.") from error

"""Registers the schema with Hydra; `conf/config.yaml` starts from it, so every key is typed and closed."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from legorl.config import secrets
from legorl.config.schema import Config


def register() -> None:
    """Idempotent. Group files need no mention of their dataclass: the root's fields carry the types."""
    ConfigStore.instance().store(name="schema", node=Config, provider="legorl")
    secrets.register()

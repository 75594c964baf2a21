"""Parts of the schema that one provider of sandboxes alone reads.

Invariant: as in `schema.py`, every key has a type, a default and, where its name does not say it, a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LocalConfig:
    """Of `sandbox=local`: images on a web server (https://….erofs), read as they are needed."""

    image_cache: str = ".cache/legorl/images"
    """Directory of what was read of them."""
    image_cache_mb: int = 4096
    image_timeout_s: float = 30.0
    """A server that is silent for so long counts as gone."""


@dataclass
class HarborConfig:
    """Of `sandbox=harbor`."""

    environment: str = "legorl.sandbox.harbor_local:LocalEnvironment"
    """Environment class, `module:Class`, or one of Harbor's own types (`docker`, `daytona`, `modal`, ...)."""
    options: list[str] = field(default_factory=list)
    """NAME=VALUE, further arguments of the class; values are YAML."""

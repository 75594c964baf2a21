"""Parts of the schema that one provider of sandboxes alone reads.

Invariant: as in `schema.py`, every key has a type, a default and, where its name does not say it, a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LocalConfig:
    """Of `sandbox=local`: images as directories or tar files, or on a web server (https://….erofs)."""

    unpacked: str = ".cache/legorl/unpacked"
    """Where images given as tar files are unpacked, each once."""
    image_cache: str = ".cache/legorl/images"
    """Directory of what was read of images on a web server, as it was needed."""
    image_cache_mb: int = 4096
    image_timeout_s: float = 30.0
    """A server that is silent for so long counts as gone."""


@dataclass
class DockerConfig:
    """Where the Docker engine of `sandbox=docker` is."""

    host: str = "unix:///var/run/docker.sock"
    """Its address, also of Podman's socket: unix://PATH or tcp://HOST:PORT."""
    certificates: str = ""
    """Directory with ca.pem, cert.pem and key.pem for an engine over TLS."""
    python: str = ""
    """Path in the image of a Python (3.9 or later) for the process that keeps a container; empty: this
    program's own Python is mounted, which the engine's machine must then have at the same path."""


@dataclass
class HarborConfig:
    """Of `sandbox=harbor`."""

    environment: str = "legorl.sandbox.harbor_local:LocalEnvironment"
    """Environment class, `module:Class`, or one of Harbor's own types (`docker`, `daytona`, `modal`, ...)."""
    options: list[str] = field(default_factory=list)
    """NAME=VALUE, further arguments of the class; values are YAML."""

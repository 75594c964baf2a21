"""A Harbor environment as this room uses it: which class, what it is made with, and what is called of it.

Invariant: Harbor is imported only when a class is asked for, so what imports this module need not have it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from legorl.config.schema_providers import HarborConfig
from legorl.errors import IntegrityError, SandboxStartError, UserError
from legorl.sandbox.base import SandboxSpec
from legorl.sandbox.policy import Policy

INSTALL = (
    "sandbox=harbor needs Harbor, which needs Python 3.12: "
    "`python3.12 -m venv .venv && .venv/bin/pip install 'legorl[harbor]'`"
)
_LOG = logging.getLogger("legorl.sandbox.harbor")


class Result(Protocol):
    """Harbor's `ExecResult`."""

    stdout: str | None
    stderr: str | None
    return_code: int


class Capabilities(Protocol):
    """Of Harbor's `EnvironmentCapabilities`."""

    mounted: bool


class Environment(Protocol):
    """What is called of Harbor's `BaseEnvironment`. Anything may raise anything."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Result: ...

    async def upload_file(self, source_path: Path | str, target_path: str) -> None: ...

    async def download_file(self, source_path: str, target_path: Path | str) -> None: ...


class Maker:
    """Constructs environments of one class."""

    def __init__(self, config: HarborConfig, policy: Policy) -> None:
        """Raises `UserError`: Harbor or the class cannot be imported, or the options are wrong."""
        self._name = config.environment
        self._policy = policy
        self._class = _load(config.environment)
        self._options = options_of(config.options)
        own = inspect.signature(self._class.__init__).parameters
        self._takes = frozenset(own)
        """Arguments that the class itself names: some are given only to a class that knows them."""

    def make(self, spec: SandboxSpec, directory: Path, image: str) -> Environment:
        """One that is not started.

        Args:
            directory: empty; for what Harbor wants to have on disk.

        Raises:
            IntegrityError: it cannot close the network.
            SandboxStartError: it cannot be constructed.
        """
        from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
        from harbor.models.trial.paths import TrialPaths

        definition = directory / "environment"
        definition.mkdir()
        paths = TrialPaths(directory / "trial")
        paths.mkdir()
        closed = self._policy.holds("network_closed")
        limited = self._policy.holds("limits")
        for_own: dict[str, Any] = {
            "pids": spec.limits.pids,
            "directories": list(spec.directories),
            "policy_off": sorted(self._policy.off),
        }
        try:
            return self._class(  # type: ignore[no-any-return]
                environment_dir=definition,
                environment_name="legorl",
                session_id=f"{spec.trial_id}-{directory.name}",
                trial_paths=paths,
                task_env_config=EnvironmentConfig(
                    docker_image=image or None,
                    memory_mb=spec.limits.memory_mb if limited else None,
                    storage_mb=spec.limits.disk_mb if limited else None,
                ),
                logger=_LOG,
                network_policy=NetworkPolicy(
                    network_mode=NetworkMode.NO_NETWORK if closed else NetworkMode.PUBLIC
                ),
                mounts=[
                    {"type": "bind", "source": str(item.source), "target": item.target, "read_only": True}
                    for item in spec.mounts
                ],
                **{name: value for name, value in for_own.items() if name in self._takes},
                **self._options,
            )
        except Exception as error:
            message = f"{spec.trial_id}: {self._name}: {error}"
            if closed and "network" in str(error):
                raise IntegrityError(
                    f"{message} Choose an environment that can close the network, or, for an ablation, "
                    "sandbox.policy_off=[network_closed]."
                ) from error
            raise SandboxStartError(message) from error


def _load(name: str) -> type[Any]:
    try:
        importlib.import_module("harbor.environments.factory")
    except ImportError as error:
        raise UserError(f"{INSTALL} ({error}).") from error
    from harbor.environments import factory
    from harbor.models.environment_type import EnvironmentType

    try:
        if ":" in name:
            module, _, attribute = name.partition(":")
            return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
        return factory._load_environment_class(EnvironmentType(name))  # type: ignore[no-any-return]
    except ValueError as error:
        known = ", ".join(item.value for item in EnvironmentType)
        raise UserError(
            f"sandbox.harbor.environment={name} is no environment of Harbor's: use module:Class or {known}."
        ) from error
    except (ImportError, AttributeError) as error:
        raise UserError(f"sandbox.harbor.environment={name} cannot be imported: {error}.") from error


def options_of(words: list[str]) -> Mapping[str, Any]:
    """Of `sandbox.harbor.options`. Raises `UserError`."""
    options = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"sandbox.harbor.options has {word!r}: write NAME=VALUE, with a YAML value.")
        try:
            options[name] = msgspec.yaml.decode(value)
        except msgspec.DecodeError as error:
            raise UserError(f"sandbox.harbor.options has {word!r}: {error}.") from error
    return options

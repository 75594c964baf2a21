"""The sandbox provider that a configuration asks for.

A provider is one module with a class; heavy client libraries are imported only when theirs is chosen.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from legorl.config.schema import SandboxConfig
from legorl.errors import UserError
from legorl.sandbox.base import SandboxProvider
from legorl.sandbox.policy import Policy, load_policy


def _local(config: SandboxConfig, policy: Policy, run: str) -> SandboxProvider:
    from legorl.sandbox.lazy import LazyCache
    from legorl.sandbox.local import LocalProvider

    local = config.local
    cache = LazyCache(Path(local.image_cache), local.image_cache_mb, local.image_timeout_s)
    return LocalProvider(
        policy,
        transfer_timeout_s=config.transfer_timeout_s,
        image=config.image,
        cache=cache,
        unpacked=Path(local.unpacked),
    )


def _docker(config: SandboxConfig, policy: Policy, run: str) -> SandboxProvider:
    try:
        from legorl.sandbox.docker import DockerProvider
    except ImportError as error:
        raise UserError(f"sandbox=docker needs `pip install 'legorl[docker]'` ({error}).") from error

    return DockerProvider(
        config.docker,
        policy,
        run=run,
        image=config.image,
        transfer_timeout_s=config.transfer_timeout_s,
    )


def _harbor(config: SandboxConfig, policy: Policy, run: str) -> SandboxProvider:
    from legorl.sandbox.harbor import HarborProvider

    return HarborProvider(
        config.harbor, policy, image=config.image, transfer_timeout_s=config.transfer_timeout_s
    )


def _kubernetes(config: SandboxConfig, policy: Policy, run: str) -> SandboxProvider:
    try:
        from legorl.sandbox.kubernetes import KubernetesProvider
    except ImportError as error:
        raise UserError(f"sandbox=kubernetes needs `pip install 'legorl[kubernetes]'` ({error}).") from error

    return KubernetesProvider(
        config.kubernetes,
        policy,
        run=run,
        image=config.image,
        transfer_timeout_s=config.transfer_timeout_s,
    )


PROVIDERS: dict[str, Callable[[SandboxConfig, Policy, str], SandboxProvider]] = {
    "local": _local,
    "docker": _docker,
    "harbor": _harbor,
    "kubernetes": _kubernetes,
}


def open_provider(config: SandboxConfig, run: str = "") -> SandboxProvider:
    """The provider called `sandbox.name`, with the policy of the configuration.

    Args:
        run: names the run to engines outside this process: what an earlier process of the run left there
            is removed, and nothing of another's. Empty: a run of its own.

    Raises:
        UserError: there is none of that name, or the machine lacks something it needs.
    """
    if config.name not in PROVIDERS:
        raise UserError(f"There is no sandbox {config.name!r}. Known: {', '.join(PROVIDERS)}.")
    return PROVIDERS[config.name](config, configured_policy(config), run)


def run_name(run_dir: Path) -> str:
    """What engines know a run by: the same for every process of a run, valid as a label."""
    path = str(run_dir.resolve())
    readable = re.sub(r"[^A-Za-z0-9]+", "-", run_dir.name)[:40].strip("-")
    return f"{readable or 'run'}-{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def configured_policy(config: SandboxConfig) -> Policy:
    """The policy of a configuration, where `sandbox.verify=same` switches the rule `fresh_grading` off.

    Raises:
        UserError: there is no such policy or rule.
    """
    in_place = ["fresh_grading"] if config.verify == "same" else []
    return load_policy(config.policy, [*config.policy_off, *in_place])

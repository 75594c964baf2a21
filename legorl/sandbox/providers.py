"""The sandbox provider that a configuration asks for.

A provider is one module with a class; heavy client libraries are imported only when theirs is chosen.
"""

from __future__ import annotations

from collections.abc import Callable

from legorl.config.schema import SandboxConfig
from legorl.errors import UserError
from legorl.sandbox.base import SandboxProvider
from legorl.sandbox.policy import Policy, load_policy


def _local(config: SandboxConfig, policy: Policy) -> SandboxProvider:
    from legorl.sandbox.local import LocalProvider

    return LocalProvider(policy, transfer_timeout_s=config.transfer_timeout_s)


PROVIDERS: dict[str, Callable[[SandboxConfig, Policy], SandboxProvider]] = {"local": _local}


def open_provider(config: SandboxConfig) -> SandboxProvider:
    """The provider called `sandbox.name`, with the policy of the configuration.

    Raises:
        UserError: there is none of that name, or the machine lacks something it needs.
    """
    if config.name not in PROVIDERS:
        raise UserError(f"There is no sandbox {config.name!r}. Known: {', '.join(PROVIDERS)}.")
    return PROVIDERS[config.name](config, configured_policy(config))


def configured_policy(config: SandboxConfig) -> Policy:
    """The policy of a configuration, where `sandbox.verify=same` switches the rule `fresh_grading` off.

    Raises:
        UserError: there is no such policy or rule.
    """
    in_place = ["fresh_grading"] if config.verify == "same" else []
    return load_policy(config.policy, [*config.policy_off, *in_place])

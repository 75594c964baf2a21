"""The sandbox of a pod, from the guard's side: a local one with the environment of the pod's image."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl.sandbox import layout
from legorl.sandbox.base import Limits, SandboxSpec
from legorl.sandbox.link import Link
from legorl.sandbox.local_sandbox import LocalSandbox
from legorl.sandbox.pod_stage import PRISTINE

_OURS = ("PATH", "PWD", "HOSTNAME", "HOME", "TERM", "LEGORL_CONTAINER")
_INJECTED = "KUBERNETES_"
"""Variables that say where the cluster's API is."""


@dataclass(frozen=True)
class Switches:
    """Which rules of the policy hold: all but these."""

    off: frozenset[str]

    def holds(self, rule: str) -> bool:
        """See `Rules`."""
        return rule not in self.off


class PodSandbox(LocalSandbox):
    """Made by the guard."""

    def __init__(
        self,
        spec: SandboxSpec,
        link: Link,
        *,
        init_pid: int,
        upper: int,
        policy: Switches,
        transfer_timeout_s: float,
        end: Callable[[], Awaitable[None]],
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(
            spec,
            link,
            init_pid=init_pid,
            upper=upper,
            groups=(),
            policy=policy,
            transfer_timeout_s=transfer_timeout_s,
            image=None,
            end=end,
        )
        self._environment = environment

    def joined_env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The image's variables, the sandbox's, the spec's and the command's."""
        return {**layout.environment(self._environment), **self._spec.env, **(extra or {})}


def spec_of(request: Mapping[str, Any]) -> SandboxSpec:
    """The spec in a provider's first request."""
    return SandboxSpec(
        trial_id=request["trial_id"],
        workspace=Path(PRISTINE),
        env=request["env"],
        limits=Limits(**request["limits"]),
    )


def image_environment(pid: int) -> dict[str, str]:
    """The variables that an image sets, from those of its container's main process."""
    pairs = Path(f"/proc/{pid}/environ").read_text(errors="surrogateescape").split("\0")
    found = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    kept = {name: value for name, value in found.items() if not name.startswith(_INJECTED)}
    path = {"PATH": kept["PATH"]} if "PATH" in kept else {}
    return {name: value for name, value in kept.items() if name not in _OURS} | path

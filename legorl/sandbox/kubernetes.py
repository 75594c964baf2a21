"""Sandboxes on Kubernetes: one pod per trial, an agent container and a privileged guard beside it.

    provider ─ websocket (exec) ─ guard ─ supervisor ─ init, keepers, commands
       └─ API server: create, watch, delete

The agent container brings image, mounts and limits; the guard closes the network, holds the task's tree,
runs the commands in the agent container's file system and looks at what they left (`pod_stage.py`).

Invariants: no thread per sandbox; a pod is deleted on every path, by `stop`, by a failed `start`, by the
process that outlives a killed provider, or by the run's next provider; and it ends by itself when its
provider is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import urllib.parse
from pathlib import Path
from typing import Any

import legorl
from legorl.config.schema_kubernetes import KubernetesConfig
from legorl.errors import ImageError, InfrastructureError, IntegrityError, SandboxStartError
from legorl.sandbox import kubernetes_pod as pods
from legorl.sandbox import layout
from legorl.sandbox.base import SandboxSpec
from legorl.sandbox.hostenv import host_environment
from legorl.sandbox.kubernetes_api import Api, ApiError
from legorl.sandbox.kubernetes_bundle import bundle, guard_command
from legorl.sandbox.kubernetes_link import GuardError, LinkLostError, PodLink
from legorl.sandbox.kubernetes_reaper import DeathWatch, reap_run
from legorl.sandbox.kubernetes_sandbox import KubernetesSandbox
from legorl.sandbox.kubernetes_upload import tar_of
from legorl.sandbox.pod_wire import WireError
from legorl.sandbox.policy import Policy

_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
)
_START_REASONS = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"}
)
_DELETE_S = 60.0


class KubernetesProvider:
    """Starts sandboxes in a cluster. Call it from one event loop."""

    name = "kubernetes"

    def __init__(
        self,
        config: KubernetesConfig,
        policy: Policy,
        *,
        run: str = "",
        image: str = "",
        transfer_timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            run: names the run, whose later processes remove what earlier ones left; empty: one of its own.
            image: for specs that name none.

        Raises:
            UserError: no pod can be made of the configuration.
        """
        pods.check_config(config)
        self.policy = policy
        self._config, self._transfer_timeout_s = config, transfer_timeout_s
        self._owner = os.urandom(8).hex()
        self._run = pods.label_value(run) or self._owner
        labels = {pods.RUN_LABEL: self._run, pods.OWNER_LABEL: self._owner}
        self._maker = pods.PodMaker(config, policy, pods.load_template(config.pod), labels, image)
        self._api = Api(config)
        self._running: set[KubernetesSandbox] = set()
        self._watch: DeathWatch | None = None
        self._reaped = asyncio.Lock()

    @property
    def limits_by(self) -> str:
        """See `SandboxProvider`."""
        return "the pod's control groups"

    async def start(self, spec: SandboxSpec) -> KubernetesSandbox:
        """See `SandboxProvider`."""
        if not spec.workspace.is_dir():
            raise SandboxStartError(f"{spec.trial_id}: {spec.workspace} does not exist on the host.")
        if not (spec.image or self._maker.image):
            raise ImageError(f"{spec.trial_id}: the task names no image; set sandbox.image.")
        await self._prepare()
        name = pods.pod_name(spec.trial_id, os.urandom(5).hex())
        about = f"{spec.trial_id} (pod {name})"
        state = _Progress()
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                link = await self._start(name, spec, state)
        except TimeoutError:
            await self._delete(name, state)
            raise SandboxStartError(
                f"{about}: not started after {spec.start_timeout_s:g} s ({state.words}); raise "
                "sandbox.start_timeout_s or lower sandbox.concurrency."
            ) from None
        except ApiError as error:
            await self._delete(name, state)
            raise SandboxStartError(f"{about}: {error}") from error
        except GuardError as error:
            await self._delete(name, state)
            kind = IntegrityError if error.kind == "IntegrityError" else SandboxStartError
            raise kind(f"{about}: {error}") from error
        except (LinkLostError, WireError, OSError) as error:
            await self._delete(name, state)
            raise SandboxStartError(f"{about}: {error} ({state.words})") from error
        except InfrastructureError as error:
            await self._delete(name, state)
            raise type(error)(f"{about}: {error}") from error
        except BaseException:
            await self._delete(name, state)
            raise

        async def end() -> None:
            self._running.discard(sandbox)
            await self._delete(name, state)

        sandbox = KubernetesSandbox(
            spec,
            name,
            link,
            listen=self._listen,
            transfer_timeout_s=self._transfer_timeout_s,
            end=end,
        )
        self._running.add(sandbox)
        return sandbox

    async def _prepare(self) -> None:
        """Once: remove what this run's dead owners left, and have somebody remove what this one leaves."""
        async with self._reaped:
            if self._watch is None:
                try:
                    await reap_run(self._api, self._run, self._owner, self._config.ttl_s)
                except ApiError as error:
                    raise SandboxStartError(str(error)) from error
                self._watch = DeathWatch(self._config, self._owner, str(Path(legorl.__file__).parents[1]))

    def _leaked(self) -> dict[str, str]:
        """Variables of this machine that commands see while the rule `no_credentials` is off."""
        if self.policy.holds("no_credentials"):
            return {}
        own = {"PATH", *layout.AGENT_ENV}
        return {name: value for name, value in host_environment().items() if name not in own}

    async def _start(self, name: str, spec: SandboxSpec, state: _Progress) -> PodLink:
        state.created = True  # from now on it may be there, whatever the answer
        await self._api.create_pod(self._maker.make(name, spec))
        async with contextlib.aclosing(self._api.watch_pod(name)) as changes:
            async for pod in changes:
                if state.look(pod):
                    break
        link = PodLink(await self._api.connect(name, pods.GUARD, guard_command()))
        state.link = link
        await link.send_program(bundle())
        request = {
            "op": "start",
            "trial_id": spec.trial_id,
            "off": sorted(self.policy.off),
            "env": {**self._leaked(), **spec.env},
            "limits": dataclasses.asdict(spec.limits),
            "directories": layout.writable(spec),
            "timeout_s": spec.start_timeout_s,
            "transfer_timeout_s": self._transfer_timeout_s,
        }
        uid = layout.UID if self.policy.holds("no_privileges") else 0
        await link.request(request, tar_of(spec.workspace, uid), timeout_s=spec.start_timeout_s)
        return link

    async def _delete(self, name: str, state: _Progress) -> None:
        """Whatever happens, the pod goes; what cannot be deleted now ends by itself, and is then reaped."""
        if not state.created:
            return

        async def delete() -> None:
            if state.link is not None:
                await state.link.close()
            with contextlib.suppress(ApiError):
                await self._api.delete_pod(name)

        work = asyncio.ensure_future(asyncio.wait_for(delete(), _DELETE_S))
        try:
            await asyncio.shield(work)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await work
            raise

    def _listen(self) -> tuple[socket.socket, str]:
        """A socket for the proxy, and the address under which pods reach it."""
        host = self._config.proxy_host or _address_towards(self._api.url)
        listener = socket.create_server((self._config.proxy_bind or host, 0), backlog=128)
        listener.setblocking(False)
        return listener, socket.gethostbyname(host)

    async def close(self) -> None:
        """See `SandboxProvider`."""
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._running)))
        await self._api.close()
        if self._watch is not None:
            watch, self._watch = self._watch, None
            await watch.close()


def _address_towards(url: str) -> str:
    """This machine's address on the way to the API server."""
    parts = urllib.parse.urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 443))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


class _Progress:
    """How far a start has come, for its error message and its clean-up."""

    def __init__(self) -> None:
        self.created = False
        self.link: PodLink | None = None
        self.words = "the pod was not created"

    def look(self, pod: dict[str, Any]) -> bool:
        """Whether both containers run.

        Raises:
            ImageError: an image cannot be had.
            SandboxStartError: the pod will never run.
        """
        status = pod.get("status", {})
        phase = status.get("phase", "Pending")
        self.words = f"the pod is {phase.lower()}"
        for condition in status.get("conditions", []):
            if condition.get("status") == "False" and condition.get("message"):
                self.words = f"{condition.get('reason', phase)}: {condition['message']}"
        if pod["metadata"].get("deletionTimestamp"):
            raise SandboxStartError("somebody deleted the pod.")
        containers = status.get("containerStatuses", [])
        for container in [*status.get("initContainerStatuses", []), *containers]:
            waiting = container.get("state", {}).get("waiting") or {}
            reason = waiting.get("reason", "")
            words = f"{container['name']}: {reason}: {waiting.get('message', container.get('image', ''))}"
            if reason in _IMAGE_REASONS:
                raise ImageError(words)
            if reason in _START_REASONS:
                raise SandboxStartError(words)
        if phase in ("Failed", "Succeeded"):
            raise SandboxStartError(f"the pod has ended: {status.get('message', _endings(containers))}")
        return {c["name"] for c in containers if "running" in c.get("state", {})} >= {pods.AGENT, pods.GUARD}


def _endings(containers: list[dict[str, Any]]) -> str:
    ended = {c["name"]: c.get("state", {}).get("terminated") for c in containers}
    return "; ".join(
        f"{name}: {end.get('reason')} {end.get('exitCode')} {end.get('message', '')}".strip()
        for name, end in ended.items()
        if end
    )

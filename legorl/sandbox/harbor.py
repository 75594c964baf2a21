"""Sandboxes that are environments of Harbor: its own, its cloud providers', or a class by import path.

All that is asked of an environment is to run commands and to take and give files; everything else a sandbox
promises is done by commands inside (`inside/once.py`), so one class after another behaves alike.

Invariants: Harbor is imported only when this provider is opened; an environment that does not close the
network when it is told to starts no sandbox; it is stopped on every path. What a killed parent leaves is the
environment's own to remove.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from legorl.config.schema_providers import HarborConfig
from legorl.errors import IntegrityError, SandboxStartError
from legorl.sandbox.base import WORKDIR, SandboxSpec
from legorl.sandbox.contained import ContainedSandbox
from legorl.sandbox.harbor_environment import Environment, Maker
from legorl.sandbox.harbor_link import HarborLink
from legorl.sandbox.harbor_relay import NoAnswerError
from legorl.sandbox.layout import AGENT_ENV, HOME, UID
from legorl.sandbox.link import LinkClosedError
from legorl.sandbox.policy import Policy, load_policy
from legorl.sandbox.pristine import Pristine
from legorl.sandbox.scratch import remove_abandoned, scratch_directory

_LOG = logging.getLogger(__name__)
_STOP_S = 60.0
_DIRECTORIES = (WORKDIR, HOME, "/logs", "/logs/agent", "/logs/verifier", "/logs/artifacts")


class HarborProvider:
    """Starts sandboxes through Harbor."""

    name = "harbor"

    def __init__(
        self,
        config: HarborConfig,
        policy: Policy | None = None,
        *,
        image: str = "",
        transfer_timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            image: for tasks that name none.

        Raises:
            UserError: Harbor is not installed, or there is no such environment.
        """
        self.policy = policy or load_policy()
        self._config = config
        remove_abandoned()
        self._maker = Maker(config, self.policy)
        self._image = image
        self._transfer_timeout_s = transfer_timeout_s
        self._running: set[ContainedSandbox] = set()

    @property
    def limits_by(self) -> str:
        """What enforces memory and process limits."""
        return f"Harbor's {self._config.environment}"

    async def start(self, spec: SandboxSpec) -> ContainedSandbox:
        """See `SandboxProvider`."""
        for path in (spec.workspace, *(item.source for item in spec.mounts)):
            if not path.exists():
                raise SandboxStartError(f"{spec.trial_id}: {path} does not exist on the host.")
        directory = scratch_directory()
        environment: Environment | None = None
        try:
            environment = self._maker.make(spec, directory, spec.image or self._image)
            async with asyncio.timeout(spec.start_timeout_s):
                return await self._start(spec, environment, directory)
        except TimeoutError as error:
            await _end(environment, directory)
            raise SandboxStartError(
                f"{spec.trial_id}: not started after {spec.start_timeout_s} s; raise sandbox.start_timeout_s."
            ) from error
        except BaseException:
            await _end(environment, directory)
            raise

    async def _start(self, spec: SandboxSpec, environment: Environment, directory: Path) -> ContainedSandbox:
        try:
            await environment.start(force_build=False)
        except Exception as error:
            raise SandboxStartError(f"{spec.trial_id}: {type(error).__name__}: {error}") from error
        link = HarborLink(environment, self._agent, drop=self.policy.holds("no_privileges"))

        async def end() -> None:
            self._running.discard(sandbox)
            await _end(environment, directory)

        sandbox = ContainedSandbox(
            spec, link, self.policy, env=AGENT_ENV, transfer_timeout_s=self._transfer_timeout_s, end=end
        )
        try:
            request = {"op": "prepare", "directories": [*_DIRECTORIES, *spec.directories]}
            answer, _ = await link.call(request, timeout_s=spec.start_timeout_s)
            if "error" in answer:
                raise SandboxStartError(f"{spec.trial_id}: {answer['error']}")
            if not environment.capabilities.mounted:
                await self._copy_mounts(spec, link, answer["uid"])
            await sandbox.fill()
        except (LinkClosedError, NoAnswerError) as error:
            raise SandboxStartError(f"{spec.trial_id}: {error}") from error
        except BaseException:
            await link.close()
            raise
        self._running.add(sandbox)
        return sandbox

    @property
    def _agent(self) -> tuple[int, int]:
        return (UID, UID) if self.policy.holds("no_privileges") else (0, 0)

    async def _copy_mounts(self, spec: SandboxSpec, link: HarborLink, uid: int) -> None:
        """Mounts of the spec as files of another user's, which the agent cannot change."""
        if spec.mounts and uid != 0 and self.policy.holds("runtime_read_only"):
            raise IntegrityError(
                f"{spec.trial_id}: {self._config.environment} neither mounts nor runs commands as root, so "
                "nothing can be kept from being changed. Without it: sandbox.policy_off=[runtime_read_only]."
            )
        for item in spec.mounts:
            batches = Pristine(item.source).batches(item.target)
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                request = {"op": "put", "entries": batch[0], "as_root": uid == 0}
                answer, _ = await link.call(request, batch[1], timeout_s=self._transfer_timeout_s)
                if "error" in answer:
                    raise SandboxStartError(f"{spec.trial_id}: {item.target}: {answer['error']}")

    async def close(self) -> None:
        """See `SandboxProvider`."""
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._running)))


async def _end(environment: Environment | None, directory: Path) -> None:
    """Never raises: what cannot be stopped is the environment's own to remove, and is logged."""
    try:
        if environment is not None:
            async with asyncio.timeout(_STOP_S):
                await environment.stop(delete=True)
    except Exception:
        _LOG.exception("An environment of Harbor could not be stopped")
    finally:
        shutil.rmtree(directory, ignore_errors=True)

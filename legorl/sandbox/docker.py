"""Sandboxes as containers of a Docker engine (or of Podman, which speaks its API): one container each.

    provider ─ engine ─ attached stream ─ PID 1 (`inside/pid1.py`) ─ keepers ─ commands

Nothing of the host's is mounted but the spec's read-only directories and the Python that runs PID 1; the
proxy's connections, files and commands all travel over the attached stream.

Invariants: a container ends with its provider's process, because its input does; only containers that carry
this run's label are ever removed, and of those only what never came to run.
"""

from __future__ import annotations

import asyncio
import os
import time

from legorl.config.schema_providers import DockerConfig
from legorl.errors import ImageError, SandboxStartError
from legorl.sandbox.base import SandboxSpec
from legorl.sandbox.contained import ContainedSandbox
from legorl.sandbox.docker_container import container, environment
from legorl.sandbox.docker_engine import Engine, EngineFailedError, check_address
from legorl.sandbox.inside_link import InsideLink
from legorl.sandbox.link import LinkClosedError
from legorl.sandbox.policy import Policy, load_policy

DEFAULT_IMAGE = "python:3.11-bookworm"
LABEL = "legorl.run"
_UNTIL = "legorl.starts-until"
_SKEW_S = 60.0
"""Clocks of a run's machines differ by less."""
_CREATE_S = 20.0


class DockerProvider:
    """Starts containers. Call it from one event loop."""

    name = "docker"
    limits_by = "the engine's control groups"

    def __init__(
        self,
        config: DockerConfig,
        policy: Policy | None = None,
        *,
        run: str = "",
        image: str = "",
        transfer_timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            config: where the engine is.
            policy: the default one where it is left out.
            run: what an earlier process of this run left is removed; empty: a run of its own.
            image: for specs that name none.
            transfer_timeout_s: of one request about files.

        Raises:
            UserError: there is no engine at a local address.
        """
        self.policy = policy or load_policy()
        self._config = config
        self._run = run or f"alone-{os.urandom(8).hex()}"
        self._image = image or DEFAULT_IMAGE
        self._transfer_timeout_s = transfer_timeout_s
        self._engine: Engine | None = None
        self._preparing: asyncio.Task[bool] | None = None
        self._running: set[ContainedSandbox] = set()
        self._cleaning: set[asyncio.Task[None]] = set()
        check_address(config)

    async def start(self, spec: SandboxSpec) -> ContainedSandbox:
        """See `SandboxProvider`. Raises `ImageError` too."""
        for path in (spec.workspace, *(item.source for item in spec.mounts)):
            if not path.exists():
                raise SandboxStartError(f"{spec.trial_id}: {path} does not exist on the host.")
        engine = self._connected()
        name = f"legorl-{os.urandom(8).hex()}"
        image = spec.image or self._image
        labels = {
            LABEL: self._run,
            "legorl.owner": str(os.getpid()),
            "legorl.trial": spec.trial_id,
            _UNTIL: str(time.time() + spec.start_timeout_s + _CREATE_S),
        }
        creating: asyncio.Task[None] | None = None
        link: InsideLink | None = None
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                podman = await self._prepared()
                body = container(spec, self.policy, image, labels, self._config.python, podman=podman)
                creating = asyncio.create_task(engine.create(body, name))
                await asyncio.shield(creating)
                link = InsideLink(await engine.attach(name))
                await engine.start(name)
                await link.start()
                sandbox = self._sandbox(spec, link, engine, name)
                await sandbox.fill()
                return sandbox
        except BaseException as error:
            cleaning = asyncio.create_task(_discard(engine, name, creating, link))
            self._cleaning.add(cleaning)  # it goes on when this call is cancelled once more
            cleaning.add_done_callback(self._cleaning.discard)
            await asyncio.shield(cleaning)
            if isinstance(error, EngineFailedError) and error.status == 404 and "image" in str(error).lower():
                raise ImageError(
                    f"{spec.trial_id}: the engine at {engine.host} has no image {image!r}: "
                    f"`legorl tasks build` builds or pulls the images of tasks."
                ) from error
            if isinstance(error, EngineFailedError | LinkClosedError):
                raise SandboxStartError(f"{spec.trial_id}: {error}") from error
            if isinstance(error, TimeoutError):
                raise SandboxStartError(
                    f"{spec.trial_id}: not started after {spec.start_timeout_s} s; raise "
                    "sandbox.start_timeout_s or lower sandbox.concurrency."
                ) from None
            raise

    def _sandbox(self, spec: SandboxSpec, link: InsideLink, engine: Engine, name: str) -> ContainedSandbox:
        async def end() -> None:
            self._running.discard(sandbox)
            await _remove(engine, name)

        sandbox = ContainedSandbox(
            spec,
            link,
            self.policy,
            env=environment(),
            transfer_timeout_s=self._transfer_timeout_s,
            end=end,
        )
        self._running.add(sandbox)
        return sandbox

    def _connected(self) -> Engine:
        if self._engine is None:
            self._engine = Engine(self._config)
        return self._engine

    async def _prepared(self) -> bool:
        """Once per provider: clear up after the run's killed processes. Whether the engine is Podman."""
        if self._preparing is None or (self._preparing.done() and self._preparing.exception()):
            self._preparing = asyncio.create_task(self._prepare())
        return await asyncio.shield(self._preparing)

    async def _prepare(self) -> bool:
        engine = self._connected()
        for name, state, labels in await engine.labels(f"{LABEL}={self._run}"):
            if state == "running" or float(labels.get(_UNTIL, "inf")) + _SKEW_S > time.time():
                continue  # it ends by itself; or somebody may be about to start it
            await engine.remove(name)
        return await engine.is_podman()

    async def close(self) -> None:
        """See `SandboxProvider`."""
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._running)))
        if self._cleaning:
            await asyncio.wait(self._cleaning, timeout=_CREATE_S)
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()


async def _discard(
    engine: Engine, name: str, creating: asyncio.Task[None] | None, link: InsideLink | None
) -> None:
    """Leave nothing of a failed start, also when the engine is still at it."""
    if creating is None:
        return
    await asyncio.wait({creating}, timeout=_CREATE_S)
    if link is not None:
        await link.close()
    if not creating.done() or creating.exception() is None:
        await _remove(engine, name)


async def _remove(engine: Engine, name: str) -> None:
    try:
        await engine.remove(name)
    except EngineFailedError:
        # An engine that cannot be asked ends the container all the same: its input has been closed.
        return

"""A harness written in Python: in a sandbox of this machine its agents come from a fork server, which has
imported the harness once; in any other they are started as the command that they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from legorl.config.schema import HarnessConfig
from legorl.harness.base import Launch
from legorl.harness.forkserver import ForkServer, Joinable
from legorl.harness.install import locate
from legorl.harness.program import INSIDE, INSIDE_TARGET, Program
from legorl.sandbox.base import ExecResult, Mount, Sandbox


class Forked(Program):
    """Base of the adapters. A subclass gives `runner`, `python` and `import_env`; it starts `program`."""

    runner: str
    """Module in `inside/` with `warm_up` and `run`; see `ForkServer`."""

    def __init__(self, config: HarnessConfig) -> None:
        super().__init__(config)
        self._server: ForkServer | None = None

    def python(self) -> Path:
        """The base interpreter it runs on. Raises `UserError` where there is none."""
        raise NotImplementedError

    def import_env(self, library: Path) -> Mapping[str, str]:
        """Settings that the harness reads when it is imported, by a fork server for one."""
        raise NotImplementedError

    def program(self, *specs: str) -> tuple[str, ...]:
        """The command that runs an agent on its configuration files."""
        runner = f"{INSIDE_TARGET}/{self.runner}.py"
        return (str(self.python()), "-I", "-S", runner, self.target, *specs)

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """See `Harness.mounts`. The library is also at its own path, where the fork server loads it from; the
        interpreter's prefix is there too, which sandboxes have only of the Python that runs this."""
        library, python = locate(self.runtime(), cache), self.python()
        if self._server is None:
            env = self.import_env(library)
            self._server = ForkServer(self.name, python, library, INSIDE, self.runner, env)
        prefix = python.parents[1]
        interpreter = () if prefix.is_relative_to("/usr") else (Mount(prefix, str(prefix)),)
        return (
            Mount(library, self.target),
            Mount(library, str(library)),
            Mount(INSIDE, INSIDE_TARGET),
            *interpreter,
        )

    async def run(self, sandbox: Sandbox, launch: Launch, timeout_s: float) -> ExecResult:
        """See `Harness.run`."""
        if self._server is None or not isinstance(sandbox, Joinable):
            return await super().run(sandbox, launch, timeout_s)
        await self.put(sandbox, launch)
        specs = launch.argv[len(self.program()) :]
        return await self._server.run(sandbox.join, specs, launch.env, timeout_s)

    async def close(self) -> None:
        """See `Harness.close`."""
        if self._server is not None:
            await self._server.close()

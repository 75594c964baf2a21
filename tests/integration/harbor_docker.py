"""An environment of Harbor on a Docker engine, by its command line: containers whose commands run as root.

It mounts nothing and does not end a command whose caller has gone away, as it is with most of Harbor's own.
"""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities


class DockerCli(BaseEnvironment):
    """One container. `host` is the engine's address."""

    def __init__(self, *args: Any, host: str, pids: int = 256, **kwargs: Any) -> None:
        self._host = host
        self._pids = pids
        super().__init__(*args, **kwargs)
        self._name = f"legorl-{self.session_id}"

    @staticmethod
    def type() -> str:
        return "docker-cli"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True)

    def _validate_definition(self) -> None:
        if not self.task_env_config.docker_image:
            raise ValueError("sandbox.image is empty")

    async def _docker(self, *arguments: str, timeout_s: float = 60) -> ExecResult:
        streams = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec("docker", "-H", self._host, *arguments, **streams)
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            raise RuntimeError(f"Command timed out after {timeout_s} seconds") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)

    async def _checked(self, *arguments: str) -> None:
        done = await self._docker(*arguments)
        if done.return_code:
            raise RuntimeError(f"docker {arguments[0]}: {done.stderr}")

    async def start(self, force_build: bool) -> None:
        limits = (
            "--memory",
            f"{self._effective_memory_mb}m",
            "--memory-swap",
            f"{self._effective_memory_mb}m",
        )
        network = ("--network", "none") if self._network_disabled else ()
        await self._checked(
            *(
                "run",
                "-d",
                "--init",
                "--name",
                self._name,
                "--pids-limit",
                str(self._pids),
                *limits,
                *network,
            ),
            *(self.task_env_config.docker_image, "sleep", "infinity"),
        )

    async def stop(self, delete: bool) -> None:
        await self._checked("rm", "-f", self._name)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        variables = [word for name, value in (env or {}).items() for word in ("-e", f"{name}={value}")]
        options = ("-w", cwd or "/", "-u", str(user or "root"), *variables)
        return await self._docker(
            "exec", *options, self._name, "bash", "-c", command, timeout_s=timeout_sec or 3600
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._checked("cp", str(source_path), f"{self._name}:{target_path}")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.exec(f"mkdir -p {shlex.quote(target_dir)}")
        await self._checked("cp", f"{source_dir}/.", f"{self._name}:{target_dir}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._checked("cp", f"{self._name}:{source_path}", str(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._checked("cp", f"{self._name}:{source_dir}/.", str(target_dir))

"""This machine's sandbox as an environment of Harbor, without a daemon:

    harbor run -p TASK -a oracle --env legorl.sandbox.harbor_local:LocalEnvironment --ek network=none

Commands run as one unprivileged user, whomever Harbor asks for. With `docker_image`, the path or address of
an image as `sandbox=local` takes it, that is the root directory; without, the machine's own programs take the
place of the base image, and a Dockerfile may only copy files and set the directory and variables.

Invariant: when `stop` returns, or this process ends in any way, nothing of the sandbox is left.
"""

from __future__ import annotations

import asyncio
import io
import shlex
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities

from legorl.errors import SandboxStartError, TransferError
from legorl.sandbox.base import WORKDIR, Limits, Mount, SandboxSpec
from legorl.sandbox.harbor_dockerfile import Recipe, read_dockerfile
from legorl.sandbox.lazy import LazyCache
from legorl.sandbox.local import LocalProvider
from legorl.sandbox.local_sandbox import LocalSandbox
from legorl.sandbox.policy import load_policy
from legorl.sandbox.scratch import remove_abandoned, scratch_directory

_DAY_S = 86_400.0
"""Deadline of a command for which Harbor names none."""
_TRANSFER_S = 120.0
_HARBOR_DIRECTORIES = ("/tests", "/solution")
"""Where Harbor uploads to; the root directory cannot be written."""
_OUTPUT_BYTES = 64 << 20


class LocalEnvironment(BaseEnvironment):  # type: ignore[misc]
    """One local sandbox."""

    def __init__(
        self,
        *args: Any,
        pids: int = 256,
        directories: list[str] | None = None,
        policy_off: list[str] | None = None,
        network: str = "",
        images: str = ".cache/legorl",
        **kwargs: Any,
    ) -> None:
        """
        Args:
            pids: most processes.
            directories: empty ones that can be written, besides the work tree, /tmp, /logs and the home.
            policy_off: rules of the integrity policy that are not kept.
            images: directory of what was read or unpacked of images.
            network: what a task gets that asks for a public network: `host`, this machine's; `none`, nothing.
        """
        self._pids = pids
        self._directories = _HARBOR_DIRECTORIES if directories is None else tuple(directories)
        self._off = frozenset(policy_off or ())
        self._images = Path(images)
        self._network = "host" if "network_closed" in self._off else network
        self._recipe = Recipe()
        self._provider: LocalProvider | None = None
        self._sandbox: LocalSandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Of the class, for Harbor's records."""
        return "legorl-local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """No network, and mounts that cannot be written."""
        return EnvironmentCapabilities(disable_internet=True, mounted=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Memory only."""
        return EnvironmentResourceCapabilities(memory_limit=True)

    def _validate_definition(self) -> None:
        if self.auto_mounting or any(not mount.get("read_only") for mount in self._host_mounts):
            raise ValueError(f"{self.type()} mounts directories of this machine read-only.")
        if self._network_is_public and self._network not in ("host", "none"):
            raise ValueError(
                "the task asks for a public network. --ek network=none runs it without one, "
                "--ek network=host in this machine's."
            )
        dockerfile = self.environment_dir / "Dockerfile"
        if not self.task_env_config.docker_image and dockerfile.exists():
            self._recipe = read_dockerfile(dockerfile)

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or self._recipe.workdir or WORKDIR

    async def start(self, force_build: bool) -> None:
        """Start the sandbox and copy what the Dockerfile copies."""
        shared = self._network_is_public and self._network == "host"
        off = self._off | ({"network_closed"} if shared else set())
        remove_abandoned()
        self._provider = LocalProvider(
            load_policy(off=off),
            transfer_timeout_s=_TRANSFER_S,
            cache=LazyCache(self._images / "images"),
            unpacked=self._images / "unpacked",
        )
        self._pristine = scratch_directory()
        targets = {self._workdir, *(copy.directory for copy in self._recipe.copies), *self._directories}
        given = ("/tmp", "/logs", "/home/agent", "/dev/shm", WORKDIR)
        spec = SandboxSpec(
            trial_id=self.session_id,
            workspace=self._pristine,
            mounts=tuple(Mount(Path(item["source"]), item["target"]) for item in self._host_mounts),
            limits=Limits(
                memory_mb=self._effective_memory_mb or Limits.memory_mb,
                pids=self._pids,
                disk_mb=self._effective_storage_mb or Limits.disk_mb,
                output_bytes=_OUTPUT_BYTES,
            ),
            image=self.task_env_config.docker_image or "",
            directories=tuple(
                sorted(t for t in targets if not any(PurePosixPath(t).is_relative_to(g) for g in given))
            ),
        )
        self._sandbox = await self._provider.start(spec)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        for copy in self._recipe.copies:
            upload = self.upload_dir if copy.source.is_dir() else self.upload_file
            await upload(copy.source, copy.target)
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """End it; nothing is kept, whatever `delete` says."""
        if self._provider is not None:
            await self._provider.close()
            shutil.rmtree(self._pristine, ignore_errors=True)

    @property
    def _running(self) -> LocalSandbox:
        if self._sandbox is None:
            raise SandboxStartError(f"{self.session_id} was not started.")
        return self._sandbox

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a shell command. Nothing that it leaves running goes on."""
        result = await self._running.exec(
            ["bash", "-c", command],
            timeout_s=timeout_sec or _DAY_S,
            env={**self._recipe.env, **(self._merge_env(env) or {})},
            cwd=cwd or self._workdir,
        )
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(
            stdout=result.stdout.decode(errors="replace"),
            stderr=result.stderr.decode(errors="replace"),
            return_code=result.code,
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file, with its mode."""
        data, mode = await asyncio.to_thread(_read, Path(source_path))
        await self._running.put(str(target_path), data, mode)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy a tree into a directory."""
        packed = await asyncio.to_thread(_packed, Path(source_dir))
        target = shlex.quote(str(target_dir))
        # The directory itself may be one that cannot be made anew, and is not touched.
        await self._tar(
            f"mkdir -p {target} && tar -C {target} --no-same-owner --no-overwrite-dir -xf -",
            packed,
        )

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out."""
        await asyncio.to_thread(_write, Path(target_path), await self._running.get(str(source_path)))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a tree out; links out of it and special files stay behind."""
        packed = await self._tar(f"tar -C {shlex.quote(str(source_dir))} -cf - .", b"")
        await asyncio.to_thread(_unpack, packed, Path(target_dir))

    async def _tar(self, script: str, stdin: bytes) -> bytes:
        result = await self._running.exec(
            ["sh", "-c", script], timeout_s=_TRANSFER_S, stdin=stdin, cwd="/tmp"
        )
        if result.code != 0:
            raise TransferError(f"{self.session_id}: `{script}`: {result.stderr.decode(errors='replace')}")
        return result.stdout


def _read(file: Path) -> tuple[bytes, int]:
    return file.read_bytes(), file.stat().st_mode & 0o7777


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def _packed(directory: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(directory, arcname=".")
    return packed.getvalue()


def _unpack(packed: bytes, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(directory, filter=transfer_tar_filter)

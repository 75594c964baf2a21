"""The local sandbox with an image for its root keeps what it keeps with this machine's programs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from legorl.errors import ImageError
from legorl.sandbox.base import SandboxSpec
from legorl.sandbox.local import LocalProvider
from legorl.sandbox.selfcheck import make_workspace, run_checks, shell_text
from tests.integration.rootfs import rootfs, rootfs_tar

pytestmark = pytest.mark.integration

CHECKS = (
    *("environment_and_directory", "put_and_get", "failing_transfers", "mounts_are_read_only"),
    *("workspace_is_a_copy", "proxy_in_the_agent_phase_only", "no_network", "host_is_invisible"),
    *("nothing_privileged", "init_cannot_be_touched", "sandboxes_are_apart", "fork_bomb"),
)


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(image=str(rootfs_tar()), unpacked=tmp_path / "images")
    yield provider
    await provider.close()


async def test_self_check(provider: LocalProvider, tmp_path: Path) -> None:
    failed = [r async for r in run_checks(provider, tmp_path / "checks", CHECKS) if r.failure]
    assert failed == []


async def test_programs_and_accounts_are_the_images(provider: LocalProvider, tmp_path: Path) -> None:
    make_workspace(tmp_path / "w")
    sandbox = await provider.start(SandboxSpec("t", tmp_path / "w"))
    assert await shell_text(sandbox, "command -v python; id -un; ls -d /home/agent") == (
        "/usr/bin/python\nagent\n/home/agent\n"
    )
    directory = await provider.start(SandboxSpec("t", tmp_path / "w", image=str(rootfs())))
    assert await shell_text(directory, "ls /") == await shell_text(sandbox, "ls /")
    with pytest.raises(ImageError, match=r"t9: .*python:3\.12"):
        await provider.start(SandboxSpec("t9", tmp_path / "w", image="python:3.12"))

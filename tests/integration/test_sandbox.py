"""The local sandbox keeps what every provider must keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from legorl.sandbox.base import Limits, SandboxSpec
from legorl.sandbox.local import LocalProvider
from legorl.sandbox.seal import sealed_workspace
from legorl.sandbox.selfcheck import all_checks, make_workspace, run_checks, shell_text

pytestmark = pytest.mark.integration


@pytest.fixture
async def provider() -> AsyncIterator[LocalProvider]:
    provider = LocalProvider()
    yield provider
    await provider.close()


@pytest.mark.parametrize("name", list(all_checks()))
async def test_self_check(provider: LocalProvider, tmp_path: Path, name: str) -> None:
    (result,) = [result async for result in run_checks(provider, tmp_path, [name])]
    assert result.failure == ""


async def test_caches_are_in_memory_and_limited(provider: LocalProvider, tmp_path: Path) -> None:
    make_workspace(tmp_path / "w")
    sandbox = await provider.start(SandboxSpec("t", tmp_path / "w", limits=Limits(disk_mb=8)))
    make = "mkdir -p $PIP_CACHE_DIR $UV_CACHE_DIR; stat -f -c %T $PIP_CACHE_DIR"
    fill = "cat /dev/zero 2>&1 >$UV_CACHE_DIR/x"
    assert await shell_text(sandbox, f"({make}; {fill}) | grep -o 'No space\\|tmpfs'") == "tmpfs\nNo space\n"


async def test_many_at_once(provider: LocalProvider, tmp_path: Path) -> None:
    make_workspace(tmp_path / "w")

    async def one(number: int) -> str:
        sandbox = await provider.start(SandboxSpec(f"t{number}", tmp_path / "w"))
        try:
            await sandbox.put("/workspace/number", str(number).encode())
            await asyncio.sleep(0.5)  # so that all of them are there together
            return (await sandbox.get("/workspace/number")).decode()
        finally:
            await sandbox.stop()

    assert await asyncio.gather(*map(one, range(64))) == [str(number) for number in range(64)]


async def test_git_in_a_sealed_workspace(provider: LocalProvider, tmp_path: Path) -> None:
    make_workspace(tmp_path / "w")
    sandbox = await provider.start(SandboxSpec("t", sealed_workspace(tmp_path / "w", tmp_path / "cache")))
    try:
        assert await shell_text(sandbox, "git status --porcelain") == ""
        assert await shell_text(sandbox, "git log --all --format=%s") == "Initial state\n"
        await shell_text(
            sandbox, "echo x >> readme.txt; git commit -qam edit; git checkout -q HEAD~1; touch new"
        )
        assert await shell_text(sandbox, "git status --porcelain") == "?? new\n"
        snapshot = await sandbox.snapshot()
        assert dict(snapshot.changed) == {"new": b""}
    finally:
        await sandbox.stop()


async def test_a_workspace_of_any_name(provider: LocalProvider, tmp_path: Path) -> None:
    workspace = tmp_path / "a:b,c\\d 'e\" ü"
    make_workspace(workspace)
    sandbox = await provider.start(SandboxSpec("t", workspace))
    try:
        assert await shell_text(sandbox, "cat readme.txt") == "one\ntwo\nthree\n"
    finally:
        await sandbox.stop()


async def test_an_edit_right_after_a_test_run_counts(provider: LocalProvider, tmp_path: Path) -> None:
    """Python takes byte code for fresh if the source has the same size and the same whole second."""
    workspace = tmp_path / "w"
    workspace.mkdir()
    (workspace / "shop.py").write_text("answer = 1 < 2\n")
    sandbox = await provider.start(SandboxSpec("t", workspace))
    script = """
        show() { python -c 'import shop; print(shop.answer)'; }
        touch -d @1700000000 shop.py; show
        sed -i 's/</>/' shop.py; touch -d @1700000000 shop.py; show
    """
    try:
        assert await shell_text(sandbox, script) == "True\nFalse\n"
    finally:
        await sandbox.stop()

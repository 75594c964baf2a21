"""What any provider must keep, as checks that run against it: for tests and for `legorl sandbox check`.

A check is an async function with a docstring that says what holds; it returns, or raises `CheckFailedError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl.errors import LegoError, UserError
from legorl.sandbox.base import ExecResult, Limits, Mount, Sandbox, SandboxProvider, SandboxSpec

EXEC_S = 20.0
CHECK_S = 90.0
START_S = 60.0
FILES = {
    "readme.txt": b"one\ntwo\nthree\n",
    "run.sh": b"#!/bin/sh\necho ran\n",
    "pkg/mod.py": b"def f(x):\n    return x + 1\n" + b"# filler\n" * 40,
    "pkg/data.bin": bytes(range(256)) * 4,
    "pkg/gone.txt": b"to be deleted\n",
}
"""The workspace of every check; run.sh is executable, `link` points to readme.txt."""


class CheckFailedError(Exception):
    """The provider does not keep what the check asks for."""


@dataclass(frozen=True)
class Bench:
    """What a check works with."""

    provider: SandboxProvider
    directory: Path
    """Scratch directory on the host."""

    @property
    def workspace(self) -> Path:
        """The pristine repository."""
        return self.directory / "workspace"

    @contextlib.asynccontextmanager
    async def sandbox(
        self,
        *,
        limits: Limits | None = None,
        mounts: tuple[Mount, ...] = (),
        env: dict[str, str] | None = None,
    ) -> AsyncIterator[Sandbox]:
        """A running sandbox, stopped in the end."""
        spec = SandboxSpec("check", self.workspace, mounts, env or {}, limits or Limits(), START_S)
        sandbox = await self.provider.start(spec)
        try:
            yield sandbox
        finally:
            await sandbox.stop()


Check = Callable[[Bench], Awaitable[None]]
_checks: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check under its function's name."""
    _checks[function.__name__] = function
    return function


def all_checks() -> dict[str, Check]:
    """Every check by name, in the order they run."""
    from legorl.sandbox import checks_exec, checks_files, checks_isolation, checks_limits

    assert checks_exec and checks_files and checks_isolation and checks_limits
    return dict(_checks)


def expect(holds: object, message: str) -> None:
    """Fail the check unless the condition holds."""
    if not holds:
        raise CheckFailedError(message)


def expect_equal(actual: object, expected: object, what: str) -> None:
    """Fail the check, showing both, unless they are equal."""
    expect(actual == expected, f"{what}: {actual!r:.500} instead of {expected!r:.500}")


async def shell(sandbox: Sandbox, script: str, **options: Any) -> ExecResult:
    """Run a shell script."""
    return await sandbox.exec(["/bin/sh", "-c", script], **{"timeout_s": EXEC_S, **options})


async def shell_text(sandbox: Sandbox, script: str, **options: Any) -> str:
    """Standard output of a shell script that must succeed."""
    result = await shell(sandbox, script, **options)
    expect_equal((result.code, result.stderr), (0, b""), f"`{script}`: status and errors")
    return result.stdout.decode()


async def python(sandbox: Sandbox, program: str, **options: Any) -> ExecResult:
    """Run a Python program."""
    return await sandbox.exec(["python", "-I", "-c", program], **{"timeout_s": EXEC_S, **options})


@dataclass(frozen=True)
class CheckResult:
    """How a check ended; `failure` is empty when it passed."""

    name: str
    failure: str
    seconds: float


async def run_checks(
    provider: SandboxProvider, directory: Path, names: Sequence[str] = ()
) -> AsyncIterator[CheckResult]:
    """Run checks one after another.

    Args:
        provider: stays open.
        directory: empty scratch directory.
        names: which; all by default.

    Raises:
        UserError: an unknown name.
    """
    checks = all_checks()
    unknown = sorted(set(names) - set(checks))
    if unknown:
        raise UserError(f"There is no sandbox check {unknown[0]!r}. Known: {', '.join(checks)}.")
    bench = Bench(provider, directory)
    make_workspace(bench.workspace)
    for name in names or checks:
        start, failure = time.monotonic(), ""
        try:
            await asyncio.wait_for(checks[name](bench), CHECK_S)
        except CheckFailedError as error:
            failure = str(error)
        except TimeoutError:
            failure = f"not finished after {CHECK_S} s"
        except UserError:  # of the settings, and the same in every check
            raise
        except LegoError as error:
            failure = f"{type(error).__name__}: {error}"
        yield CheckResult(name, failure, time.monotonic() - start)


def make_workspace(directory: Path) -> None:
    """Write the checks' workspace."""
    for name, data in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (directory / "run.sh").chmod(0o755)
    (directory / "link").symlink_to("readme.txt")


def apply_patch(workspace: Path, patch: str, target: Path) -> None:
    """Apply a snapshot's patch with git to a copy of the workspace.

    Raises:
        CheckFailedError: git does not take it.
    """
    shutil.copytree(workspace, target, symlinks=True)
    if not patch:
        return
    result = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        cwd=target,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(target.parent)},
        input=patch.encode(),
        capture_output=True,
        timeout=30,
        check=False,
    )
    expect_equal(result.returncode, 0, f"git apply: {result.stderr.decode()}")


def names_of(results: Iterable[CheckResult]) -> list[str]:
    """Names of the checks that failed."""
    return [result.name for result in results if result.failure]

"""The local sandbox works for a user without privileges."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
NOBODY = "65534"
CHECK = """
import asyncio, pathlib, sys, tempfile
from legorl.sandbox.local import LocalProvider
from legorl.sandbox.policy import load_policy
from legorl.sandbox.selfcheck import run_checks

async def check():
    provider = LocalProvider(load_policy(sys.argv[1]))
    with tempfile.TemporaryDirectory() as directory:
        try:
            results = [result async for result in run_checks(provider, pathlib.Path(directory))]
            return provider.limits_by, results
        finally:
            await provider.close()

limits, results = asyncio.run(check())
print("limits by", limits, [result for result in results if result.failure])
sys.exit(any(result.failure for result in results))
"""
NEEDED = ("msgspec", "yaml")
"""Packages that the sandbox room uses, whose compiled parts fit the system's Python too."""


def test_self_check_without_root() -> None:
    python, setpriv = shutil.which("python3", path="/usr/bin:/usr/local/bin"), shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("needs root and setpriv to become somebody else")
    if python is None or subprocess.run([python, "-c", "import tomllib"], check=False).returncode:
        pytest.skip("no Python 3.11 that everybody may run")
    with tempfile.TemporaryDirectory() as directory:  # the checkout may lie where nobody else may look
        package = Path(directory, "legorl")
        shutil.copytree(ROOT / "legorl" / "sandbox", package / "sandbox")
        for name in ("__init__.py", "errors.py"):
            shutil.copy(ROOT / "legorl" / name, package / name)
        for name in NEEDED:
            shutil.copytree(Path(import_module(name).__path__[0]), Path(directory, name))
        policy = shutil.copy(ROOT / "conf" / "sandbox" / "policy" / "strict.yaml", directory)
        for path in (Path(directory), *Path(directory).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": directory, "PYTHONDONTWRITEBYTECODE": "1"}
        result = subprocess.run(
            [setpriv, "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", python, "-c", CHECK, policy],
            env=environment, cwd="/", capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    assert "limits by rlimit" in result.stdout

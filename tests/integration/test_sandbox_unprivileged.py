"""The local sandbox works for a user without privileges."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
NOBODY = "65534"
CHECK = """
import argparse, sys
from legorl.sandbox import commands
parser = argparse.ArgumentParser()
commands.add_parser(parser.add_subparsers())
arguments = parser.parse_args(["sandbox", "check"])
sys.exit(arguments.run(arguments))
"""


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
        for path in (Path(directory), *Path(directory).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": directory, "PYTHONDONTWRITEBYTECODE": "1"}
        result = subprocess.run(
            [setpriv, "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", python, "-c", CHECK],
            env=environment, cwd="/", capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    assert "limits by rlimit" in result.stdout

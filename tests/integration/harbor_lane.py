"""Harbor needs Python 3.12, and this project's environment has 3.11: one of its own for tests, made once.

    done = lane("-m", "legorl.cli", "sandbox", "check", "sandbox=harbor")

Invariant: an environment lies in the cache complete or not at all, under a name made of its lock's content;
this package itself is not installed there, so checkouts can share one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from legorl.harness.fetch import find_python

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "harbor.lock"
_CACHE = ROOT / ".cache" / "harbor"
_MAKE_S = 600


def lane(*arguments: str | Path, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python."""
    command = [harbor_python(), *arguments]
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def environment() -> dict[str, str]:
    """Without telemetry, and without the price list that LiteLLM would fetch."""
    quiet = {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


def harbor_python() -> Path:
    """Its interpreter. Raises `UserError` where there is no Python 3.12."""
    name = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]
    made = _CACHE / name
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "complete").exists():
            shutil.rmtree(made, ignore_errors=True)
            _make(made)
            (made / "complete").touch()
    return made / "bin" / "python"


def _make(directory: Path) -> None:
    base = find_python("3.12")
    _run(base, "-m", "venv", directory)
    uv = Path(sys.executable).with_name("uv")
    if uv.exists():
        links = ROOT / "scripts" / "find_links.sh"
        install = f'. {links} && exec "$0" pip install -q --no-deps "${{links[@]}}" --python "$1" -r "$2"'
        _run("bash", "-c", install, uv, directory / "bin" / "python", LOCK)
    else:
        pip = directory / "bin" / "pip"
        _run(pip, "install", "-q", "--no-deps", "--disable-pip-version-check", "-r", LOCK)


def _run(*command: str | Path) -> None:
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=_MAKE_S, check=False)
        output.seek(0)
        assert done.returncode == 0, f"{command[0]}: {output.read()[-2000:]}"

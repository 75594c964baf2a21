"""Run directories: made once, found by name, and the life of a run in `run.json`.

Invariants: a directory is made with an exclusive `mkdir`, so no two runs share one; `run.json` is replaced
atomically; a run is alive exactly while some process holds the lock, so a killed one can never look alive.
"""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from legorl.errors import UserError

INFO_FILE = "run.json"
LOCK_FILE = "lock"
BALLAST_FILE = ".ballast"
BALLAST_BYTES = 1 << 16
"""Space kept for the last words of a run that fills the disk."""


@dataclass(frozen=True)
class RunInfo:
    """What `run.json` holds."""

    id: str
    steps: int
    created: float
    """Unix seconds."""
    state: str = "running"
    """`running`, `finished`, `failed` or `killed`."""
    reason: str = ""
    """Why it did not finish."""
    ended: float | None = None
    name: str = ""
    command: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    """Group -> choice."""
    config_hash: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    sweep: str = ""
    """Shared by the runs of one multirun."""
    mlflow_run: str = ""


def new_run_dir(runs: Path) -> Path:
    """Make `runs/<date>-<time>-<4 hex>`; another process may do the same in the same second."""
    runs.mkdir(parents=True, exist_ok=True)
    while True:
        path = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        (path / BALLAST_FILE).write_bytes(bytes(BALLAST_BYTES))
        return path


def write_info(run_dir: Path, info: RunInfo) -> None:
    """Replace `run.json`."""
    partial = run_dir / f"{INFO_FILE}.partial"
    with partial.open("w") as file:
        json.dump(dataclasses.asdict(info), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(run_dir / INFO_FILE)


def read_info(run_dir: Path) -> RunInfo:
    """Read `run.json` as written; `live_info` tells a dead run from a running one.

    Raises:
        UserError: missing or unreadable.
    """
    file = run_dir / INFO_FILE
    try:
        return msgspec.convert(json.loads(file.read_text()), RunInfo)
    except FileNotFoundError:
        raise UserError(f"{run_dir} has no {INFO_FILE}: it is no run directory.") from None
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        raise UserError(f"{file} is not a run description: {error}.") from error


def live_info(run_dir: Path) -> RunInfo:
    """As `read_info`; a run that says `running` while nobody holds its lock was killed."""
    info = read_info(run_dir)
    if info.state == "running" and not is_locked(run_dir):
        info = read_info(run_dir)  # it may have ended between the two looks
        if info.state == "running":
            return dataclasses.replace(info, state="killed", reason="its supervisor is gone")
    return info


def end_run(run_dir: Path, state: str, reason: str = "") -> None:
    """Record how a run ended, on a full disk too."""
    (run_dir / BALLAST_FILE).unlink(missing_ok=True)
    write_info(
        run_dir, dataclasses.replace(read_info(run_dir), state=state, reason=reason, ended=time.time())
    )


@contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Hold the run's lock.

    Raises:
        UserError: another process holds it.
    """
    # For a second: `is_locked` holds it for an instant.
    with locked(run_dir / LOCK_FILE, 1.0, f"{run_dir} is in use by another process."):
        yield


@contextmanager
def locked(file: Path, timeout_s: float, busy: str) -> Iterator[None]:
    """Hold an exclusive lock on a file, made if need be; a process that dies gives it back.

    Raises:
        UserError: `busy`, when another process holds it for longer than `timeout_s`.
    """
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(busy) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def is_locked(run_dir: Path) -> bool:
    """Whether some process holds the run's lock."""
    try:
        fd = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def list_runs(runs: Path) -> list[Path]:
    """Run directories, newest first: their names begin with the time."""
    return sorted((file.parent for file in runs.glob(f"*/{INFO_FILE}")), reverse=True)


def find_run(runs: Path, name: str) -> Path:
    """The run called `name`: `last`, a directory, an id or the beginning of one.

    Raises:
        UserError: none or several, with the nearest ids.
    """
    if (Path(name) / INFO_FILE).is_file():
        return Path(name)
    if "/" in name:  # which no id has
        why = f"it has no {INFO_FILE}" if Path(name).exists() else "it does not exist"
        raise UserError(f"{name} is no run directory: {why}. `legorl status` lists the runs.")
    known = list_runs(runs)
    if not known:
        raise UserError(f"There are no runs in {runs}. `legorl train` makes one; --runs DIR looks elsewhere.")
    if name == "last":
        return known[0]
    matches = [path for path in known if path.name == name] or [p for p in known if p.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    ids = [path.name for path in known]
    if matches:
        raise UserError(f"{name!r} begins several runs: {', '.join(path.name for path in matches[:5])}.")
    near = difflib.get_close_matches(name, ids, n=3, cutoff=0.5) or ids[:3]
    raise UserError(f"There is no run {name!r} in {runs}. Near: {', '.join(near)}.")

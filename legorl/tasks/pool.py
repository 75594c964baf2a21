"""A pool: a directory of task directories with an index.

    pool.json  index.parquet  tasks/<id>/

Invariants: a pool directory is complete or absent (it is built elsewhere and renamed); the index holds
relative paths and one content hash per task; tasks come in the index's order, which is the generator's.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from legorl.errors import UserError
from legorl.tasks.task import Task, load_task

SPLITS = ("train", "heldout")
POOL_FILE = "pool.json"
INDEX_FILE = "index.parquet"


def pool_dir(pools: Path, name: str, seed: int) -> Path:
    """Where the pool of this name and seed lies."""
    return pools / f"{name}-{seed}"


@dataclass(frozen=True)
class Screening:
    """What running a task showed. All true for every task of a pool."""

    fails_without_fix: bool
    """Hidden tests, every run."""
    passes_with_fix: bool
    visible_red_without_fix: bool
    visible_green_with_fix: bool
    runs: int
    reason: str = ""
    """What was seen instead, for a task that does not hold."""

    @property
    def ok(self) -> bool:
        """The task can grade."""
        return (
            self.fails_without_fix
            and self.passes_with_fix
            and self.visible_red_without_fix
            and self.visible_green_with_fix
        )


@dataclass(frozen=True)
class Entry:
    """One row of the index."""

    id: str
    path: str
    """Relative to the pool."""
    content_hash: str
    source: str
    repository: str
    module: str
    split: str
    fails_without_fix: bool
    passes_with_fix: bool
    visible_red_without_fix: bool
    visible_green_with_fix: bool
    runs: int


@dataclass(frozen=True)
class Manifest:
    """Content of `pool.json`."""

    name: str
    seed: int
    about: str
    """Whom the pool is for."""
    generator: str
    """Name and version of what made it."""
    train: int
    heldout: int
    hash: str
    """SHA-256 over the ids, splits and content hashes of all tasks, in order."""


@dataclass(frozen=True)
class Pool:
    """An opened pool."""

    path: Path
    manifest: Manifest
    entries: tuple[Entry, ...]

    def tasks(self, split: str) -> list[Task]:
        """Tasks of a split, in index order.

        Raises:
            UserError: no such split, or a task directory is missing or broken.
        """
        if split not in SPLITS:
            raise UserError(f"A pool has the splits train and heldout; there is no {split!r}.")
        return [self._load(entry) for entry in self.entries if entry.split == split]

    def all_tasks(self) -> list[Task]:
        """Of both splits, in index order. Raises `UserError` as `tasks`."""
        return [load_task(self.path / entry.path) for entry in self.entries]

    def task(self, id: str) -> Task:
        """The task of this id.

        Raises:
            UserError: the pool has no such task; similar ids are named.
        """
        for entry in self.entries:
            if entry.id == id:
                return self._load(entry)
        near = difflib.get_close_matches(id, [entry.id for entry in self.entries])
        hint = (
            f" Did you mean {', '.join(near)}?" if near else " `legorl tasks list POOL` shows what there is."
        )
        raise UserError(f"Pool {self.path} has no task {id!r}.{hint}")

    def _load(self, entry: Entry) -> Task:
        """The index decides on the split: a task made elsewhere knows none."""
        return dataclasses.replace(load_task(self.path / entry.path), split=entry.split)


def pool_hash(entries: Sequence[Entry]) -> str:
    """See `Manifest.hash`."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.id} {entry.split} {entry.content_hash}\n".encode())
    return digest.hexdigest()


def write_index(path: Path, manifest: Manifest, entries: Sequence[Entry]) -> None:
    """Write `pool.json` and `index.parquet` into a pool under construction."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([dataclasses.asdict(entry) for entry in entries])
    pq.write_table(table, path / INDEX_FILE)
    (path / POOL_FILE).write_text(json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")


def load_pool(path: Path) -> Pool:
    """Open a pool. Task directories are read when asked for.

    Raises:
        UserError: no pool there, or its index cannot be read.
    """
    try:
        manifest = Manifest(**json.loads((path / POOL_FILE).read_text()))
    except FileNotFoundError as error:
        raise UserError(
            f"There is no task pool at {path}. `legorl tasks synth repair --seed N` makes one of that seed "
            "(.cache/legorl/pools/repair-N), and `legorl train` the one that it needs."
        ) from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{path / POOL_FILE} is not a pool description: {error}.") from error

    import pyarrow as pa
    import pyarrow.parquet as pq

    index = path / INDEX_FILE
    try:
        entries = tuple(Entry(**row) for row in pq.read_table(index).to_pylist())
    except (OSError, pa.ArrowInvalid, TypeError) as error:
        raise UserError(
            f"The index {index} cannot be read: {error}. Remove the pool and make it again."
        ) from error
    for entry in entries:
        if Path(entry.path).is_absolute() or ".." in Path(entry.path).parts:
            raise UserError(f"The index {index} has task {entry.id} at {entry.path!r}, outside of the pool.")
    return Pool(path, manifest, entries)

"""Builds pools: drafts from a generator, each kept only if running it shows that it can grade.

Invariants: a pool appears whole, by one rename, or not at all; the same (name, seed, counts) give the same
bytes; a pool that exists is never changed.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from legorl.errors import UserError
from legorl.tasks import real, repair
from legorl.tasks.draft import Draft, content_hash, write_task
from legorl.tasks.pool import SPLITS, Entry, Manifest, Pool, Screening, load_pool, pool_hash, write_index
from legorl.tasks.scratch import scratch
from legorl.tasks.task import load_task
from legorl.tasks.validate import validate_tasks

Progress = Callable[[int, int], None]
"""Called with how many tasks are ready, of how many."""


@dataclass(frozen=True)
class Generator:
    """A kind of pool."""

    version: str
    about: str
    drafts: Callable[[int, str], Iterator[Draft]]
    """(seed, split) -> drafts in a fixed order, none twice."""
    train: int
    heldout: int
    """Numbers of tasks unless others are asked for."""


GENERATORS = {
    repair.NAME: Generator(repair.GENERATOR, repair.ABOUT, repair.drafts, 320, 96),
    real.NAME: Generator(real.GENERATOR, real.ABOUT, real.drafts, 24, 12),
}


FEW = 8
"""More rejected drafts than this, and than were asked for, end a build: the generator is at fault."""


def generator(name: str) -> Generator:
    """The generator of this name. Raises `UserError` with what there is."""
    if name in GENERATORS:
        return GENERATORS[name]
    near = difflib.get_close_matches(name, GENERATORS)
    hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(GENERATORS)}."
    raise UserError(f"No generator makes a pool {name!r}. {hint}")


@dataclass(frozen=True)
class Request:
    """Everything a pool's content depends on."""

    name: str
    seed: int
    train: int
    heldout: int
    generator: str

    def __str__(self) -> str:
        return (
            f"{self.name} seed {self.seed}, {self.train} train, {self.heldout} heldout, by {self.generator}"
        )


def synth(
    name: str,
    seed: int,
    train: int,
    heldout: int,
    out: Path,
    *,
    jobs: int = 2,
    progress: Progress = lambda done, total: None,
) -> Pool:
    """Make a pool at `out`, or return the one that is there if it was made the same way.

    Raises:
        UserError: no such generator, or it has too few tasks; another pool is at `out`; bwrap is missing.
    """
    kind = generator(name)
    if train < 1 or heldout < 1:
        raise UserError(f"A pool needs at least one task per split, not train={train} heldout={heldout}.")
    request = Request(name, seed, train, heldout, kind.version)
    if out.exists():
        return _existing(out, request)
    with scratch(out.parent, f".{out.name}-") as directory:
        build = directory / "pool"
        entries: list[Entry] = []
        for split, count in zip(SPLITS, (train, heldout), strict=True):
            before, total = len(entries), train + heldout
            drafts = kind.drafts(seed, split)
            for number, entry in enumerate(_screened(drafts, count, build, jobs), 1):
                entries.append(entry)
                progress(before + number, total)
        manifest = Manifest(**dataclasses.asdict(request), about=kind.about, hash=pool_hash(entries))
        write_index(build, manifest, entries)
        try:
            build.rename(out)
        except OSError:
            if not out.exists():
                raise
            return _existing(out, request)  # another process was faster
    return load_pool(out)


def _existing(out: Path, request: Request) -> Pool:
    pool = load_pool(out)
    has = pool.manifest
    found = Request(has.name, has.seed, has.train, has.heldout, has.generator)
    if found == request:
        return pool
    raise UserError(
        f"{out} holds another pool ({found}) than the one asked for ({request}). "
        "Ask for the same, or remove the directory."
    )


def _screened(drafts: Iterator[Draft], count: int, build: Path, jobs: int) -> Iterator[Entry]:
    """The first `count` drafts that hold, written below `build`; those that do not are removed again."""
    kept = 0
    reasons: list[str] = []
    while kept < count:
        batch = list(itertools.islice(drafts, count - kept))
        if not batch or len(reasons) > max(count, FEW):
            why = (
                f" {len(reasons)} drafts were left out, the last one because {reasons[-1]}."
                if reasons
                else ""
            )
            raise UserError(f"Of {count} tasks asked for in a split, only {kept} could be made.{why}")
        paths = [build / "tasks" / draft.id for draft in batch]
        for draft, path in zip(batch, paths, strict=True):
            write_task(draft, path)
        screenings = validate_tasks([load_task(path) for path in paths], jobs)
        for draft, path, screening in zip(batch, paths, screenings, strict=True):
            if screening.ok:
                kept += 1
                yield _entry(draft, path, screening)
            else:
                reasons.append(screening.reason)
                shutil.rmtree(path)


def _entry(draft: Draft, path: Path, screening: Screening) -> Entry:
    results = dataclasses.asdict(screening)
    del results["reason"]
    return Entry(
        id=draft.id,
        path=f"tasks/{draft.id}",
        content_hash=content_hash(path),
        source=draft.source,
        repository=draft.repository,
        module=draft.module,
        split=draft.split,
        **results,
    )

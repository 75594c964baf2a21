"""A pool as `synth` would leave it, without the runs that screen its tasks."""

from pathlib import Path

import pytest

from legorl.tasks import repair
from legorl.tasks.draft import Draft, content_hash, write_task
from legorl.tasks.pool import Entry, Manifest, pool_dir, pool_hash, write_index

TRAIN, HELDOUT = 5, 2


def entry(draft: Draft, path: Path) -> Entry:
    return Entry(
        id=draft.id,
        path=f"tasks/{draft.id}",
        content_hash=content_hash(path),
        source=draft.source,
        repository=draft.repository,
        module=draft.module,
        split=draft.split,
        fails_without_fix=True,
        passes_with_fix=True,
        visible_red_without_fix=True,
        visible_green_with_fix=True,
        runs=2,
    )


@pytest.fixture
def pools(tmp_path: Path) -> Path:
    """A pools directory that holds `repair-0`."""
    pools = tmp_path / "pools"
    path = pool_dir(pools, "repair", 0)
    drafts = [repair.make(0, "train", n) for n in range(TRAIN)] + [
        repair.make(0, "heldout", n) for n in range(HELDOUT)
    ]
    entries = []
    for draft in drafts:
        write_task(draft, path / "tasks" / draft.id)
        entries.append(entry(draft, path / "tasks" / draft.id))
    manifest = Manifest("repair", 0, repair.ABOUT, repair.GENERATOR, TRAIN, HELDOUT, pool_hash(entries))
    write_index(path, manifest, entries)
    return pools

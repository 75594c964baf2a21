"""Transcripts for a warm start: trials of a scripted expert, through the real harness, proxy and sandbox.

Invariant: what is returned is what training will see, rows of real trials with their invariants checked; a
trial that infrastructure ended is run again, one that fails again and again ends the capture with its reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from legorl.errors import InfrastructureError
from legorl.proxy.row import Row
from legorl.tasks.task import Task
from legorl.trial.record import TrialRecord
from legorl.trial.runner import TrialRequest, TrialRunner

ATTEMPTS = 3
"""Times one episode is tried before its failure is taken for a lasting one."""

Progress = Callable[[int, int], None]
"""Called with the episodes done and their total."""


async def capture(
    tasks: Sequence[Task],
    episodes: int,
    runner: TrialRunner,
    *,
    label: str,
    progress: Progress = lambda done, total: None,
) -> list[tuple[TrialRecord, list[Row]]]:
    """Run `episodes` trials over `tasks`, round robin, as many at once as the runner allows.

    Args:
        tasks: at least one.
        episodes: number of trials.
        runner: its proxy speaks to the expert's engine; its run directory takes the records.
        label: part of the trial ids (the expert's mode).
        progress: called after every episode.

    Returns:
        Record and rows of each episode, in order.

    Raises:
        InfrastructureError: an episode failed `ATTEMPTS` times; the message has its last cause.
    """
    done = 0

    async def episode(index: int) -> tuple[TrialRecord, list[Row]]:
        nonlocal done
        task = tasks[index % len(tasks)]
        record = None
        for attempt in range(ATTEMPTS):
            trial_id = f"{label}-{index:05d}" + (f"-again{attempt}" if attempt else "")
            result = await runner.run(TrialRequest(task, trial_id, group=trial_id, step=0, split=task.split))
            record = result.record
            if not record.excluded:
                done += 1
                progress(done, episodes)
                return record, result.rows
        assert record is not None
        raise InfrastructureError(
            f"Episode {index} of the capture on task {task.id} failed {ATTEMPTS} times, at last with "
            f"{record.termination}: {record.detail} Its files are in {runner.run_dir / record.path}."
        )

    running = [asyncio.ensure_future(episode(index)) for index in range(episodes)]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for trial in running:
            trial.cancel()
        await asyncio.gather(*running, return_exceptions=True)

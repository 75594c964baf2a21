"""The prompts that verl's data loader hands out: one row per task, naming the task and nothing else.

The harness makes the real prompt; verl only needs to know which task a trial works on.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from legorl.tasks.task import Task

AGENT_NAME = "trial"


def write_dataset(tasks: list[Task], split: str, file: Path) -> None:
    """Write verl's parquet columns for `tasks`, in order."""
    rows = [
        {
            "data_source": "legorl",
            "agent_name": AGENT_NAME,
            "prompt": [{"role": "user", "content": task.id}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "task": task.id, "split": split},
        }
        for index, task in enumerate(tasks)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)

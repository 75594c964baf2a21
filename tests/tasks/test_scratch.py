"""Scratch directories: gone at the end; those of the killed are removed, those of the living are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from legorl.tasks.scratch import scratch

HOLD = """
import sys, time
from pathlib import Path
from legorl.tasks.scratch import scratch
with scratch(Path(sys.argv[1]), ".work-") as directory:
    (directory / "data").write_text("half")
    print("held", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    (tmp_path / ".work-file").touch()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with scratch(tmp_path, ".work-") as own:
            assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
        assert not own.exists()
        holder.kill()
    assert len(list(tmp_path.glob(".work-*/data"))) == 1
    with scratch(tmp_path, ".work-") as own:
        assert [path for path in tmp_path.iterdir() if path.is_dir()] == [own]
    assert [path.name for path in tmp_path.iterdir()] == [".work-file"]


def test_the_parent_is_made(tmp_path: Path) -> None:
    with scratch(tmp_path / "a" / "b", ".work-") as own:
        assert own.parent == tmp_path / "a" / "b"

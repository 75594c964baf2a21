"""Temporary directories of this process that the next one removes when this one was killed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

_NAME = re.compile(r"legorl-scratch-(\d+)-.+")


def scratch_directory() -> Path:
    """A new one; whoever made it removes it."""
    return Path(tempfile.mkdtemp(prefix=f"legorl-scratch-{os.getpid()}-"))


def remove_abandoned() -> None:
    """Remove those of processes that are gone."""
    for path in Path(tempfile.gettempdir()).glob("legorl-scratch-*"):
        match = _NAME.fullmatch(path.name)
        if match and not Path("/proc", match[1]).exists():
            shutil.rmtree(path, ignore_errors=True)

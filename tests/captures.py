"""Recorded traffic of real harnesses, as tests read it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

CAPTURES = sorted((Path(__file__).parent / "data" / "captures").glob("*.jsonl.gz"))


@cache
def load_capture(path: Path) -> tuple[dict[str, Any], ...]:
    """The requests of one file, in the order they arrived in."""
    with gzip.open(path, "rt") as lines:
        return tuple(sorted((json.loads(line) for line in lines), key=lambda record: record["n"]))


def headers_of(record: dict[str, Any]) -> dict[str, str]:
    """Headers with lower-case names, as a server gives them."""
    return {name.lower(): value for name, value in record["headers"]}


def requests() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every request of every file."""
    for path in CAPTURES:
        for record in load_capture(path):
            yield path, record

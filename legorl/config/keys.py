"""Names of the configuration: dotted keys of the schema, groups and their choices, and nearest names."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from legorl.config.schema import Config


@cache
def schema_keys() -> dict[str, Any]:
    """Dotted key -> type, for every key of the tree; inner nodes (`model.warm_start`) included."""
    keys: dict[str, Any] = {}

    def walk(node: type, prefix: str) -> None:
        hints = typing.get_type_hints(node)
        for entry in dataclasses.fields(node):
            key = prefix + entry.name
            keys[key] = hints[entry.name]
            if dataclasses.is_dataclass(keys[key]):
                walk(keys[key], key + ".")

    walk(Config, "")
    return keys


def packaged_dir() -> Path:
    """The packaged `conf` directory."""
    return Path(import_module("legorl.conf").__path__[0]).resolve()


@cache
def packaged_groups() -> tuple[str, ...]:
    """Names of the groups. A user's directory adds choices to them, and no groups."""
    return tuple(sorted(path.name for path in packaged_dir().iterdir() if any(path.glob("*.yaml"))))


RESOURCES = ("sandbox/policy", "sandbox/pod")
"""Folders beside a group's choices whose files are named by a key of the group instead."""


def is_choice(file: Path, directory: Path) -> bool:
    """Whether a file of a configuration directory is a choice of a group."""
    return file.is_file() and file.relative_to(directory).parent.as_posix() not in RESOURCES


def groups(directories: Sequence[Path]) -> dict[str, list[str]]:
    """Group -> choices, over all directories; a choice may lie in a folder (`paper/openhands`)."""
    found: dict[str, set[str]] = {}
    for directory in directories:
        for group in packaged_groups():
            for file in directory.glob(f"{group}/**/*.yaml"):
                if is_choice(file, directory):
                    choice = file.relative_to(directory / group).with_suffix("").as_posix()
                    found.setdefault(group, set()).add(choice)
    return {group: sorted(choices) for group, choices in sorted(found.items())}


def suggest(name: str, known: Iterable[str]) -> str:
    """` Did you mean …?` with the nearest of the known names, or an empty string."""
    known = list(dict.fromkeys(known))
    leaf = name.rpartition(".")[2]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    near = same_leaf or difflib.get_close_matches(name, known, n=2, cutoff=0.75)
    if not near:
        leaves = {key.rpartition(".")[2]: key for key in known}
        near = [leaves[match] for match in difflib.get_close_matches(leaf, leaves, n=2, cutoff=0.75)]
    if not near:
        near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {' or '.join(near[:3])}?" if near else ""

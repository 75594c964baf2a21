"""A task: a Harbor task directory (task.toml schema 1.4), with the metadata of this project or without.

    task.toml  instruction.md  environment/repo/  tests/  solution/

A directory made elsewhere, without `[metadata.legorl]`, is known by its Harbor name, trains, and is graded by
the reward that its `test.sh` states. With that section, all of its fields are needed.

Invariant: nothing below `tests/` or `solution/` enters a sandbox before the verify phase (I6).
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legorl.errors import UserError

_VERIFY_S = 600.0
_BUILD_S = 600.0
"""Harbor's own defaults."""
_PARTS = (
    *("task.toml", "instruction.md", "environment", "environment/repo"),
    *("tests", "tests/test.sh", "solution", "solution/solve.sh"),
)
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+|^[.-]+")
"""What cannot be in the name of a directory, a container or an address."""


@dataclass(frozen=True)
class Task:
    """One task. All fields but `path` come from its `task.toml` or from the pool's index."""

    id: str
    path: Path
    split: str
    """`train` or `heldout`."""
    source: str
    """`synthetic` or `package==version`."""
    module: str
    """Module the defect lies in; splits are disjoint in it."""
    instruction: str
    test_command: str
    """What an agent runs to see the visible tests, exactly as the instruction names it; empty: not known."""
    pass_pattern: str
    """Regular expression: output of `test_command` in which it is found is green."""
    hidden_tests: tuple[str, ...]
    """Names of the hidden tests that must all be reported as passed; empty: the verifier's reward decides."""
    verify_timeout_s: float = 60.0
    image: str = ""
    """Container image of its environment, where it names one."""
    build_timeout_s: float = 600.0
    """For its Dockerfile, where it names no image."""
    metadata: dict[str, str] = field(default_factory=dict)
    own_metadata: bool = True
    """It has the section `[metadata.legorl]`."""

    @property
    def environment(self) -> Path:
        """What an image of it is built from."""
        return self.path / "environment"

    @property
    def dockerfile(self) -> Path | None:
        """Its Dockerfile, if it has one."""
        file = self.environment / "Dockerfile"
        return file if file.is_file() else None

    @property
    def workspace(self) -> Path:
        """The pristine repository, with the defect; where there is none, what the image is built from."""
        repo = self.environment / "repo"
        return repo if repo.is_dir() else repo.parent

    @property
    def tests(self) -> Path:
        """Hidden tests and `test.sh`."""
        return self.path / "tests"

    @property
    def solution(self) -> Path:
        """`fix.patch` (git-apply-able) and Harbor's `solve.sh`."""
        return self.path / "solution"


def load_task(path: Path) -> Task:
    """Read a task directory.

    Raises:
        UserError: a file is missing, or a field is absent or wrong, with its name.
    """
    file = path / "task.toml"
    try:
        raw = tomllib.loads(file.read_text())
        lego = raw.get("metadata", {}).get("legorl")
        own = lego is not None
        if not own:
            lego = _defaults(raw, path)
        task = Task(
            id=_text(lego, "id"),
            path=path,
            split=_text(lego, "split"),
            source=_text(lego, "source"),
            module=_text(lego, "module"),
            instruction=(path / "instruction.md").read_text(),
            test_command=_text(lego, "test_command"),
            pass_pattern=_text(lego, "pass_pattern"),
            hidden_tests=_names(lego, "hidden_tests"),
            verify_timeout_s=_number(raw.get("verifier", {}), "timeout_sec", _VERIFY_S),
            image=str(raw.get("environment", {}).get("docker_image") or ""),
            own_metadata=own,
            build_timeout_s=_number(raw.get("environment", {}), "build_timeout_sec", _BUILD_S),
            metadata={str(k): str(v) for k, v in lego.get("extra", {}).items()},
        )
        re.compile(task.pass_pattern)
    except OSError as error:
        raise UserError(f"{path} is not a task directory: {error.filename}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"The texts of {path} are not all in UTF-8: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}.") from error
    except re.error as error:
        raise UserError(f"pass_pattern in {file} is no regular expression: {error}.") from error
    except KeyError as error:
        raise UserError(f"{file} lacks the field {error}.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file} has a field of a wrong type: {error}.") from error
    if _UNFIT.search(task.id):
        raise UserError(f"{file}: id={task.id!r} can name no directory: use letters, digits, `.`, `_`, `-`.")
    _stay_inside(path)
    for name, seconds in (
        ("timeout_sec", task.verify_timeout_s),
        ("build_timeout_sec", task.build_timeout_s),
    ):
        if not 0 < seconds < math.inf:
            raise UserError(f"{file}: {name}={seconds} is no number of seconds.")
    if missing := [part for part in (task.workspace, task.tests / "test.sh") if not part.exists()]:
        raise UserError(f"{path} is not a task directory: {missing[0]} is missing.")
    return task


def _text(table: Mapping[str, Any], name: str) -> str:
    if not isinstance(table[name], str):
        raise TypeError(f"{name} is {table[name]!r:.60} and not a text")
    return str(table[name])


def _names(table: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values = table[name]
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{name} is {values!r:.60} and not a list of texts")
    return tuple(values)


def _number(table: Mapping[str, Any], name: str, default: float) -> float:
    value = table.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r:.60} and not a number")
    return float(value)


def _stay_inside(path: Path) -> None:
    """A part of a task that is a link to elsewhere would bring files of the host into a sandbox."""
    root = path.resolve()
    for name in _PARTS:
        part = path / name
        if part.exists() and not part.resolve().is_relative_to(root):
            raise UserError(f"{path} is not a task directory: {name} leads out of it, to {part.resolve()}.")


def _defaults(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """What `[metadata.legorl]` would say of a task that was made elsewhere."""
    name = str(raw.get("task", {}).get("name") or path.resolve().name)
    organisation, _, own = name.rpartition("/")
    return {
        "id": _UNFIT.sub("-", own) or "task",
        "split": "train",
        "source": organisation or "harbor",
        "module": name,
        "test_command": "",
        "pass_pattern": "",
        "hidden_tests": (),
    }

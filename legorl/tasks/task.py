"""A task: a Harbor task directory (task.toml schema 1.4) with the metadata this project adds to it.

    task.toml  instruction.md  environment/repo/  tests/  solution/

Invariant: nothing below `tests/` or `solution/` enters a sandbox before the verify phase (I6).
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from legorl.errors import UserError


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
    """What an agent runs to see the visible tests, exactly as the instruction names it."""
    pass_pattern: str
    """Regular expression: output of `test_command` in which it is found is green."""
    hidden_tests: tuple[str, ...]
    """Names of the hidden tests that must all be reported as passed."""
    verify_timeout_s: float = 60.0
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def workspace(self) -> Path:
        """The pristine repository, with the defect."""
        return self.path / "environment" / "repo"

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
        lego = raw["metadata"]["legorl"]
        task = Task(
            id=str(lego["id"]),
            path=path,
            split=str(lego["split"]),
            source=str(lego["source"]),
            module=str(lego["module"]),
            instruction=(path / "instruction.md").read_text(),
            test_command=str(lego["test_command"]),
            pass_pattern=str(lego["pass_pattern"]),
            hidden_tests=tuple(str(name) for name in lego["hidden_tests"]),
            verify_timeout_s=float(raw["verifier"]["timeout_sec"]),
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
    if not 0 < task.verify_timeout_s < math.inf:
        raise UserError(f"{file}: timeout_sec={task.verify_timeout_s} is no number of seconds.")
    if missing := [part for part in (task.workspace, task.tests / "test.sh") if not part.exists()]:
        raise UserError(f"{path} is not a task directory: {missing[0]} is missing.")
    return task

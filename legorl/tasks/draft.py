"""A task before it is on disk, and the one place that writes task directories (Harbor schema 1.4).

Invariant: what is written depends on the draft alone, byte for byte, file modes included.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

GRADER_DEADLINE_S = 20
"""For the hidden tests of one task; well below the task's own verifier timeout."""

VERIFIER_TIMEOUT_S = 60.0

# The full Debian image: it has git, which solve.sh and most agents want.
DOCKERFILE = """FROM python:3.11-bookworm
WORKDIR /workspace
COPY repo/ /workspace/
"""

TEST_SH = """#!/bin/bash
# Harbor's verifier: leaves reward.txt (1 or 0) and result.json (which tests passed) in /logs/verifier.
mkdir -p /logs/verifier
cd /workspace && exec python -I -S -B /tests/run_hidden.py {deadline} {search_path} {modules}
"""

SOLVE_SH = """#!/bin/bash
cd /workspace && git apply "$(dirname "${BASH_SOURCE[0]}")/fix.patch"
"""

EXECUTABLE = {"tests/test.sh", "solution/solve.sh"}


@dataclass(frozen=True)
class Draft:
    """Everything a task directory is made of."""

    id: str
    split: str
    source: str
    """`synthetic` or `package==version`."""
    repository: str
    """Name of the project the repository shows: a package, or the generator."""
    module: str
    """Module the defect lies in; splits are disjoint in it."""
    instruction: str
    repo: Mapping[str, str]
    """Path in the repository -> text, with the defect."""
    fixed: tuple[str, str]
    """Path of the defective file and its text without the defect."""
    test_command: str
    pass_pattern: str
    tests: Mapping[str, str]
    """Path below `tests/` -> text of the hidden tests and what they need."""
    test_modules: tuple[str, ...]
    hidden_tests: tuple[str, ...]
    """Names (`unittest` ids) that must pass."""
    search_path: str = "/workspace"
    """Where the grader imports the repository from; several are joined by `:`."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """For tests and studies; never shown to the agent."""

    def patch(self) -> str:
        """The reference fix as a unified diff that `git apply` takes."""
        path, good = self.fixed
        lines = difflib.unified_diff(
            self.repo[path].splitlines(True), good.splitlines(True), f"a/{path}", f"b/{path}"
        )
        return "".join(lines)


def task_toml(draft: Draft) -> str:
    """Text of `task.toml`. JSON strings and lists of strings are valid TOML."""

    def quote(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    lines = [
        'schema_version = "1.4"',
        "",
        "[task]",
        f"name = {quote(f'legorl/{draft.id}')}",
        "",
        "[metadata]",
        'category = "repair"',
        "",
        "[metadata.legorl]",
    ]
    for name in ("id", "split", "source", "repository", "module", "test_command", "pass_pattern"):
        lines.append(f"{name} = {quote(getattr(draft, name))}")
    lines.append("hidden_tests = [")
    lines.extend(f"    {quote(name)}," for name in draft.hidden_tests)
    lines += ["]", "", "[metadata.legorl.extra]"]
    lines.extend(f"{name} = {quote(value)}" for name, value in draft.extra.items())
    lines += ["", "[agent]", "timeout_sec = 600.0", "", "[verifier]", f"timeout_sec = {VERIFIER_TIMEOUT_S}"]
    lines += ["", "[environment]", "cpus = 1", "memory_mb = 1024", "storage_mb = 1024"]
    return "\n".join(lines) + "\n"


def files(draft: Draft) -> Iterator[tuple[str, str]]:
    """Path in the task directory and text of every file."""
    grader = Path(__file__).with_name("grader.py").read_text()
    yield "task.toml", task_toml(draft)
    yield "instruction.md", draft.instruction
    yield "environment/Dockerfile", DOCKERFILE
    for path, text in draft.repo.items():
        yield f"environment/repo/{path}", text
    for path, text in draft.tests.items():
        yield f"tests/{path}", text
    yield "tests/run_hidden.py", grader
    yield "tests/required.txt", "".join(f"{name}\n" for name in draft.hidden_tests)
    test_sh = TEST_SH.format(
        deadline=GRADER_DEADLINE_S, search_path=draft.search_path, modules=" ".join(draft.test_modules)
    )
    yield "tests/test.sh", test_sh
    yield "solution/fix.patch", draft.patch()
    yield "solution/solve.sh", SOLVE_SH


def write_task(draft: Draft, directory: Path) -> None:
    """Write the task directory, which must not exist yet."""
    directory.mkdir(parents=True)
    for name, text in files(draft):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        path.chmod(0o755 if name in EXECUTABLE else 0o644)


def content_hash(directory: Path) -> str:
    """SHA-256 over the paths, executable bits and contents of all files of a task directory."""
    digest = hashlib.sha256()
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        data = path.read_bytes()
        mode = "x" if path.stat().st_mode & 0o100 else "-"
        digest.update(f"{path.relative_to(directory).as_posix()}\0{mode}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()

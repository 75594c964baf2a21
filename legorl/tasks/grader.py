"""Runs the hidden tests of one task; copied verbatim into its `tests/` as `run_hidden.py`.

    python -I -S -B /tests/run_hidden.py DEADLINE_S SEARCH_PATH[:SEARCH_PATH...] TEST_MODULE...

Leaves in /logs/verifier: `result.json` {"passed": [names], "failed": {name: message}} and `reward.txt`,
1 if every name of `required.txt` (beside this file) passed, else 0. Standard library only.

Invariants: nothing of the repository shadows a module of the grader (the standard library comes first on
the search path, then the hidden tests, the repository last); code of the repository runs in a child
process, which writes no verdict file and whose crash, early exit or endless loop is a failure of the tests
and not of the grader; bytecode left in the repository is never executed.
Limit: tests and tested code share that child process, so code written to forge its report is not caught here.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # importing typing would cost 5 ms of a budget of 100
if TYPE_CHECKING:
    from typing import Any

TESTS = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would double the start-up
LOGS = "/logs/verifier"
SUITE = "(suite)"
"""Name under which the failure of the suite as a whole is reported."""


def run_suite(modules: list[str], search_path: list[str]) -> dict[str, object]:
    """Run the tests in this process. Imports of the grader happen before the search path is extended."""
    import unittest

    passed: list[str] = []
    failed: dict[str, str] = {}

    def fail(test: Any, error: Any) -> None:
        failed[test.id()] = f"{error[0].__name__}: {error[1]}".strip()[-500:]

    class Result(unittest.TestResult):
        def addSuccess(self, test: Any) -> None:
            passed.append(test.id())

        def addExpectedFailure(self, test: Any, err: Any) -> None:
            passed.append(test.id())

        def addFailure(self, test: Any, err: Any) -> None:
            fail(test, err)

        def addError(self, test: Any, err: Any) -> None:
            fail(test, err)

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                fail(test, err)

        def addUnexpectedSuccess(self, test: Any) -> None:
            failed[test.id()] = "unexpected success"

    sys.path.extend([TESTS, *search_path])
    unittest.TestLoader().loadTestsFromNames(modules).run(Result())
    return {"passed": sorted(set(passed) - set(failed)), "failed": failed}


def remove_bytecode(directory: str) -> None:
    """Delete every bytecode file: Python trusts one whose recorded time and size match its source."""
    for folder, _, names in os.walk(directory):
        for name in names:
            if name.endswith(".pyc"):
                os.unlink(f"{folder}/{name}")  # noqa: PTH108


def read_all(pipe: int, deadline: float) -> bytes | None:
    """Everything up to end of file, or None at the deadline."""
    data = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return data
        data += chunk


def supervise(deadline_s: float, modules: list[str], search_path: list[str]) -> dict[str, object]:
    """Run the tests in a child process group that is gone when this returns."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(reader)
        verdict = json.dumps(run_suite(modules, search_path)).encode()
        while verdict:
            verdict = verdict[os.write(writer, verdict) :]
        os._exit(0)
    os.close(writer)
    try:
        data = read_all(reader, time.monotonic() + deadline_s)
    finally:
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if data is None:
        return {"passed": [], "failed": {SUITE: f"not finished after {deadline_s:g} s"}}
    try:
        verdict = json.loads(data)
    except ValueError:
        return {"passed": [], "failed": {SUITE: "the process that ran the tests ended without a verdict"}}
    return dict(verdict)


def main(deadline: str, search_path: str, *modules: str) -> None:
    """Grade and write the verdict."""
    paths = search_path.split(":")
    for path in paths:
        remove_bytecode(path)
    with open(f"{TESTS}/required.txt") as file:  # noqa: PTH123
        required = set(file.read().split("\n")) - {""}
    verdict = supervise(float(deadline), list(modules), paths)
    passed = verdict["passed"]
    assert isinstance(passed, list)
    reward = int(bool(required) and required <= set(passed))
    for name, text in ("result.json", json.dumps(verdict, indent=1)), ("reward.txt", f"{reward}\n"):
        with open(f"{LOGS}/{name}", "w") as file:  # noqa: PTH123
            file.write(text)


if __name__ == "__main__":
    main(*sys.argv[1:])

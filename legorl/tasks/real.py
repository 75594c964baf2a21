"""The pool `repair_real`: one defect in a real, permissively licensed pure-Python package, graded by its own
tests. For models that can read code; a tiny policy learns nothing here.

Invariants: train and held-out tasks come from different packages; a task's hidden tests are all tests that
pass without the defect, at least one of which fails with it; every failure named in the instruction was seen.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from legorl.errors import UserError
from legorl.tasks import isolate
from legorl.tasks.draft import GRADER_DEADLINE_S, Draft, write_task
from legorl.tasks.mutate import Mutation, candidates
from legorl.tasks.sdist import Package, fetch

NAME = "repair_real"
GENERATOR = "repair_real/1"
ABOUT = "One defect in a real package, graded by its own tests: a pool for models that can read code."

MOST_FAILURES = 12
"""A defect that breaks more tests than this is an earthquake, not a bug to look for."""
NAMED_FAILURES = 5

TEST_COMMAND = "python -B -m unittest discover -q -s tests -t ."
PASS_PATTERN = r"(?m)^OK( \(.*\))?$"

PACKAGES = (
    Package(
        "cachetools",
        "8.0.2",
        "30ac523adfc118b51d2b2e7bad8a0ddb31370dfe2700c7f10ca224f36ccf81e0",
        "train",
        {"src/cachetools/": "cachetools/", "tests/": "tests/"},
        ("tests/test_threading.py",),  # timing
    ),
    Package(
        "simpleeval",
        "1.0.8",
        "b417f869c11f2de034eb919820a825f35d12ce99f63a43971947ce73679eb9ba",
        "train",
        {"simpleeval.py": "simpleeval.py", "tests/": "tests/"},
        ("tests/test_disallowed_functions.py",),  # wants builtins of the site module
    ),
    Package(
        "uritemplate",
        "4.2.0",
        "480c2ed180878955863323eea31b0ede668795de182617fef9c6ca09e6ec9d0e",
        "heldout",
        {"uritemplate/": "uritemplate/", "tests/test_uritemplate.py": "tests/test_uritemplate.py"},
    ),
    Package(
        "titlecase",
        "2.4.1",
        "7d83a277ccbbda11a2944e78a63e5ccaf3d32f828c594312e4862f9a07f635f5",
        "heldout",
        {"titlecase/__init__.py": "titlecase/__init__.py", "titlecase/tests.py": "tests/test_titlecase.py"},
    ),
)

INSTRUCTION = """{count} of the tests of {package} {fail}, because of one defect in its code:
{failures}
The tests are right. Find the defect and repair it. Run the tests with `{command}`.
"""


@dataclass(frozen=True)
class Verdict:
    """What the grader said of one state of a repository."""

    passed: tuple[str, ...]
    failed: Mapping[str, str]


def drafts(seed: int, split: str) -> Iterator[Draft]:
    """Tasks of one split, packages in turn, until their mutations are used up."""
    packages = [package for package in PACKAGES if package.split == split]
    repositories = fetch(packages)
    streams = [_of_package(seed, package, repositories[package.name]) for package in packages]
    number = itertools.count()
    while streams:
        for stream in list(streams):
            make = next(stream, None)
            if make is None:
                streams.remove(stream)
            else:
                yield make(next(number))


@dataclass(frozen=True)
class _Found:
    """A mutation that the tests see."""

    seed: int
    package: Package
    repository: Mapping[str, str]
    path: str
    mutation: Mutation
    passing: tuple[str, ...]
    failed: Mapping[str, str]

    def __call__(self, number: int) -> Draft:
        """The task of this number."""
        good, split = self.repository[self.path], self.package.split
        named = [f"- {name}: {text.splitlines()[0]}" for name, text in sorted(self.failed.items())]
        if len(named) > NAMED_FAILURES:
            named = [*named[:NAMED_FAILURES], f"- and {len(named) - NAMED_FAILURES} more"]
        return _draft(
            id=f"{NAME}-{self.seed}-{split}-{number:04}",
            package=self.package,
            module=self.path.removesuffix(".py").removesuffix("/__init__").replace("/", "."),
            instruction=INSTRUCTION.format(
                count=len(self.failed),
                package=self.package.name,
                fail="fails" if len(self.failed) == 1 else "fail",
                failures="\n".join(named),
                command=TEST_COMMAND,
            ),
            repository={**self.repository, self.path: self.mutation.apply(good)},
            fixed=(self.path, good),
            passing=self.passing,
            extra={
                "path": self.path,
                "line": str(self.mutation.line),
                "kind": self.mutation.kind,
                "right": self.mutation.before,
                "wrong": self.mutation.after,
                "failing": " ".join(sorted(self.failed)),
            },
        )


def _of_package(seed: int, package: Package, repository: Mapping[str, str]) -> Iterator[_Found]:
    """Mutations of a package that break a few of its tests, in an order drawn from the seed."""
    code = [path for path in repository if path.endswith(".py") and not path.startswith("tests/")]
    reference = _grade(package, repository, code[0], ())
    if reference.failed:
        raise UserError(
            f"Tests of {package.pin} fail without any defect, first {next(iter(reference.failed.items()))}. "
            "This Python cannot make the pool; use 3.11."
        )
    pairs = [(path, mutation) for path in code for mutation in candidates(repository[path])]
    random.Random(f"{GENERATOR}-{seed}-{package.name}").shuffle(pairs)
    for path, mutation in pairs:
        mutant = {**repository, path: mutation.apply(repository[path])}
        failed = _grade(package, mutant, path, reference.passed).failed
        if 0 < len(failed) <= MOST_FAILURES and failed.keys() <= set(reference.passed):
            yield _Found(seed, package, repository, path, mutation, reference.passed, failed)


def _draft(
    *,
    id: str,
    package: Package,
    module: str,
    instruction: str,
    repository: Mapping[str, str],
    fixed: tuple[str, str],
    passing: tuple[str, ...],
    extra: Mapping[str, str],
) -> Draft:
    tests = {path: text for path, text in repository.items() if path.startswith("tests/")}
    return Draft(
        id=id,
        split=package.split,
        source=package.pin,
        repository=package.name,
        module=module,
        instruction=instruction,
        repo=repository,
        fixed=fixed,
        test_command=TEST_COMMAND,
        pass_pattern=PASS_PATTERN,
        tests=tests,
        test_modules=tuple(
            path.removesuffix(".py").replace("/", ".") for path in tests if path.startswith("tests/test_")
        ),
        hidden_tests=passing,
        extra=extra,
    )


def _grade(package: Package, repository: Mapping[str, str], path: str, passing: tuple[str, ...]) -> Verdict:
    """Run the package's tests on a repository as a task of this pool would."""
    draft = _draft(
        id="candidate",
        package=package,
        module="",
        instruction="",
        repository=repository,
        fixed=(path, repository[path]),
        passing=passing,
        extra={},
    )
    with tempfile.TemporaryDirectory(prefix="legorl-mutant-") as directory:
        task, out = Path(directory) / "task", Path(directory) / "out"
        write_task(draft, task)
        out.mkdir()
        script = (
            "cp -r /task/environment/repo/. . && bash /tests/test.sh && cp /logs/verifier/result.json /out/"
        )
        done = isolate.run(
            script,
            read_only={"/task": task, "/tests": task / "tests"},
            writable={"/out": out},
            timeout_s=2.0 * GRADER_DEADLINE_S,
        )
        if done.code or done.timed_out:
            raise UserError(f"The tests of {package.pin} could not be run: {done.output.strip()[-500:]}")
        result = json.loads((out / "result.json").read_text())
    return Verdict(tuple(result["passed"]), dict(result["failed"]))

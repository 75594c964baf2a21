"""The default pool `repair`: small modules with one wrong operator, a pool a tiny policy can learn from.

What a policy of a million parameters can learn here is a habit (run the tests, on red try again, submit on
green), not the meaning of code: the right operator shows only in the asserts, and each of the alternatives
is one edit away. For stronger models there is `repair_real`.

Invariants: the visible asserts tell the right operator from every other one of its family, so green means
right; train and held-out tasks share no function name; a task is a function of (seed, split, number).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from legorl.tasks.draft import Draft
from legorl.tasks.mutate import FAMILIES, candidates

NAME = "repair"
GENERATOR = "repair/1"
"""Changes whenever the same seed gives other tasks."""

ABOUT = "Small modules with one wrong operator: a pool a tiny policy can learn from (a habit, not a meaning)."

PACKAGES = ["shop", "bank", "game", "farm", "post", "grid", "club", "fleet", "depot", "studio"]
MODULES = [
    "cart",
    "rules",
    "stock",
    "score",
    "level",
    "price",
    "quota",
    "route",
    "queue",
    "batch",
    "ledger",
    "badge",
]
NOUNS = [
    "age",
    "weight",
    "speed",
    "depth",
    "score",
    "price",
    "stock",
    "level",
    "width",
    "height",
    "count",
    "power",
    "energy",
    "rank",
    "balance",
]
LIMITS = ["limit", "bound", "target", "budget", "cap", "quota", "base", "ratio", "step", "margin"]
VERBS = ["check", "get", "find", "calc", "test", "eval", "make", "pick", "show", "read"]

VISIBLE = 4
HIDDEN = 12
HIDDEN_OTHER = 3
"""Hidden asserts on each function that is not defective."""

TEST_COMMAND = "python check.py"
PASS_PATTERN = r"(?m)^\d+ passed$"

CHECK = '''"""Tests of {path}: `python check.py`."""

import sys

TESTS = [
{tests}]

# The source is compiled here and not imported: bytecode of an edit within the same second would be stale.
scope = {{}}
try:
    with open("{path}") as file:
        exec(compile(file.read(), "{path}", "exec"), scope)
except Exception as error:
    print(f"E {{type(error).__name__}}\\n{{len(TESTS)}} failed")
    sys.exit(1)

failures = []
for name, args, want in TESTS:
    try:
        got = scope[name](*args)
        passed = got == want and type(got) is type(want)
    except Exception as error:
        got, passed = type(error).__name__, False
    if not passed:
        failures.append(f"E assert {{name}}({{', '.join(map(str, args))}}) == {{want}} got {{got}}")

if failures:
    print(f"{{failures[0]}}\\n{{len(failures)}} failed, {{len(TESTS) - len(failures)}} passed")
    sys.exit(1)
print(f"{{len(TESTS)}} passed")
'''

HIDDEN_HEAD = '''"""Hidden tests of {path}."""

import unittest

from {module} import {names}


class HiddenTest(unittest.TestCase):
    def check(self, got, want):
        self.assertEqual(got, want)
        self.assertIs(type(got), type(want))
'''

HIDDEN_TEST = """
    def test_{number:02}_{name}(self):
        self.check({name}({a}, {b}), {want})
"""


@dataclass(frozen=True)
class Function:
    """`def name(first, second): return first operator second`."""

    name: str
    first: str
    second: str
    kind: str
    """Operator family, a key of `FAMILIES`."""
    operator: str

    def source(self) -> str:
        head = f"def {self.name}({self.first}, {self.second}):"
        return f"{head}\n    return {self.first} {self.operator} {self.second}\n"


@dataclass(frozen=True)
class Case:
    """One assert: `function(a, b) == want`."""

    function: str
    a: int
    b: int
    want: int
    """A bool for comparisons."""


@dataclass(frozen=True)
class Spec:
    """What a scripted expert or a test wants to know of a task of this pool; not for the agent."""

    path: str
    line: int
    function: str
    kind: str
    operator: str
    """The right one."""
    wrong: str
    """The one in the repository."""


def spec(metadata: dict[str, str]) -> Spec:
    """The answer key of a task, from `Task.metadata`."""
    fields = dict(metadata)
    line = int(fields.pop("line"))
    return Spec(line=line, **fields)


def held_out(name: str) -> bool:
    """Whether a function of this name belongs to the held-out split (one name in five)."""
    return int(hashlib.md5(name.encode()).hexdigest(), 16) % 5 == 0


def evaluate(operator: str, a: int, b: int) -> int:
    """`a operator b` for an operator of the families."""
    return int(eval(f"a {operator} b", {"a": a, "b": b}))


def _result(kind: str, operator: str, a: int, b: int) -> int:
    value = evaluate(operator, a, b)
    return bool(value) if kind == "cmp" else value


def _arguments(rng: random.Random, kind: str) -> tuple[int, int]:
    """Arguments near the interesting places of a family; small enough to read."""
    if kind == "arith":
        return rng.randrange(10, 50), rng.randrange(2, 10)
    b = rng.randrange(5, 50)
    return b + rng.choice([-1, 0, 1, rng.randrange(-5, 40)]), b


def _functions(rng: random.Random, split: str) -> list[Function]:
    functions: list[Function] = []
    for _ in range(rng.randrange(1, 4)):
        while True:
            noun, limit = rng.choice(NOUNS), rng.choice(LIMITS)
            name = f"{rng.choice(VERBS)}_{noun}"
            if held_out(name) == (split == "heldout") and name not in [f.name for f in functions]:
                break
        kind = rng.choice(list(FAMILIES))
        functions.append(Function(name, noun, limit, kind, rng.choice(FAMILIES[kind])))
    return functions


def _visible(rng: random.Random, function: Function) -> list[Case]:
    """Asserts that tell every operator of the family from the right one."""
    while True:
        pairs = [_arguments(rng, function.kind) for _ in range(VISIBLE)]
        want = [evaluate(function.operator, *pair) for pair in pairs]
        others = [o for o in FAMILIES[function.kind] if o != function.operator]
        if all([evaluate(o, *pair) for pair in pairs] != want for o in others):
            return [_case(function, pair) for pair in pairs]


def _case(function: Function, pair: tuple[int, int]) -> Case:
    return Case(function.name, *pair, _result(function.kind, function.operator, *pair))


def make(seed: int, split: str, number: int) -> Draft:
    """The task of this number, a pure function of its arguments."""
    rng = random.Random(f"{GENERATOR}-{split}-{seed}-{number}")
    functions = _functions(rng, split)
    index = rng.randrange(len(functions))
    function, line = functions[index], 3 * index + 2
    package, module = rng.choice(PACKAGES), rng.choice(MODULES)
    path = f"{package}/{module}.py"

    good = "\n".join(f.source() for f in functions)
    mutation = rng.choice([m for m in candidates(good) if m.line == line and m.kind == function.kind])
    bad = mutation.apply(good)

    visible = _visible(rng, function)
    hidden = [_case(function, _arguments(rng, function.kind)) for _ in range(HIDDEN)]
    for other in functions:
        if other is not function:
            hidden += [_case(other, _arguments(rng, other.kind)) for _ in range(HIDDEN_OTHER)]
    hidden += visible

    failing = [
        f"assert {c.function}({c.a}, {c.b}) == {c.want} got {got}"
        for c in visible
        if (got := _result(function.kind, mutation.after, c.a, c.b)) != c.want
    ]
    instruction = [
        f"The tests of `{function.name}` fail.",
        *failing[:2],
        f"Location: {path} line {line}",
        bad.split("\n")[line - 1],
    ]
    tests = [
        HIDDEN_TEST.format(number=i, name=c.function, a=c.a, b=c.b, want=c.want) for i, c in enumerate(hidden)
    ]
    head = HIDDEN_HEAD.format(
        path=path, module=f"{package}.{module}", names=", ".join(f.name for f in functions)
    )
    check = "".join(f"    ({c.function!r}, ({c.a}, {c.b}), {c.want}),\n" for c in visible)
    return Draft(
        id=f"{NAME}-{seed}-{split}-{number:04}",
        split=split,
        source="synthetic",
        repository=NAME,
        module=f"{package}.{module}:{function.name}",
        instruction="\n".join(instruction),
        repo={f"{package}/__init__.py": "", path: bad, "check.py": CHECK.format(path=path, tests=check)},
        fixed=(path, good),
        test_command=TEST_COMMAND,
        pass_pattern=PASS_PATTERN,
        tests={"test_hidden.py": head + "".join(tests)},
        test_modules=("test_hidden",),
        hidden_tests=tuple(f"test_hidden.HiddenTest.test_{i:02}_{c.function}" for i, c in enumerate(hidden)),
        extra={
            "path": path,
            "line": str(line),
            "function": function.name,
            "kind": function.kind,
            "operator": function.operator,
            "wrong": mutation.after,
        },
    )


def drafts(seed: int, split: str) -> Iterator[Draft]:
    """Tasks of one split in order, without end; no two have the same defective module text."""
    seen: set[str] = set()
    number = 0
    while True:
        draft = make(seed, split, number)
        text = draft.repo[draft.fixed[0]]
        if text not in seen:
            seen.add(text)
            yield draft
        number += 1

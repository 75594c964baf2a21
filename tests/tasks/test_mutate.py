"""Mutations edit one span of the source and nothing else."""

import ast
import inspect
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl.tasks import draft, pool
from legorl.tasks.mutate import FAMILIES, candidates


def found(source: str, kind: str) -> set[tuple[str, str]]:
    return {(m.before, m.after) for m in candidates(source) if m.kind == kind}


@pytest.mark.parametrize(
    ("source", "kind", "expected"),
    [
        ("x = a < b", "cmp", {("<", o) for o in ("<=", ">", ">=", "==")}),
        ("x = a // b", "arith", {("//", o) for o in ("+", "-", "*", "%")}),
        ("x = a and b or c", "operator", {("and", "or"), ("or", "and")}),
        ("x = a not in b", "operator", {("not in", "in")}),
        ("x = a is not b", "operator", {("is not", "is")}),
        ("x += 1", "operator", {("+=", "-=")}),
        ("x = 0", "constant", {("0", "1")}),
        ("x = 7", "constant", {("7", "8"), ("7", "6")}),
        ("x = True, 1.5, 'a', 0x10", "constant", set()),
        ("if a:\n    b()", "negation", {("a", "not (a)")}),
        ("f(a, b)", "arguments", {("a, b", "b, a")}),
        ("f(a, a)", "arguments", set()),
        ("f(*a, b)", "arguments", set()),
        ("f((a), b)", "arguments", set()),
        ("f(a, (b))", "arguments", set()),
        ("x = f'{a < b}'", "cmp", set()),
    ],
)
def test_candidates(source: str, kind: str, expected: set[tuple[str, str]]) -> None:
    assert found(source, kind) == expected


def test_only_the_span_changes_also_after_wide_characters_and_in_odd_layout() -> None:
    source = textwrap.dedent(
        """\
        # größer — ≤
        def prüfe(wört, grenze):
            s = "äöü<"; return (s, (wört)   <  # less
                (grenze))
        """
    )
    less = [m for m in candidates(source) if m.kind == "cmp"]
    assert {m.after for m in less} == {"<=", ">", ">=", "=="}
    for mutation in less:
        assert mutation.line == 3
        assert mutation.apply(source) == source.replace("(wört)   <  #", f"(wört)   {mutation.after}  #")


def test_order_is_the_source_order() -> None:
    starts = [m.start for m in candidates("x = a < 3\ny = b + 4\n")]
    assert starts == sorted(starts)


def test_accept_leaves_out_subtrees() -> None:
    source = "def f():\n    return 1 + x\ny = a < b\n"
    kinds = {m.kind for m in candidates(source, lambda node: not isinstance(node, ast.FunctionDef))}
    assert kinds == {"cmp"}


@pytest.mark.parametrize("module", [draft, pool])
def test_every_mutant_of_real_code_parses_and_differs(module: object) -> None:
    source = inspect.getsource(module)  # type: ignore[arg-type]
    original = ast.dump(ast.parse(source))
    mutations = candidates(source)
    assert len(mutations) > 10
    for mutation in mutations:
        assert source[mutation.start : mutation.end] == mutation.before
        assert ast.dump(ast.parse(mutation.apply(source))) != original


OPERATORS = [operator for family in FAMILIES.values() for operator in family]


@given(st.sampled_from(OPERATORS), st.integers(0, 3), st.text("äß≤x", max_size=5), st.booleans())
def test_any_operator_is_found_wherever_it_stands(operator: str, gap: int, name: str, nested: bool) -> None:
    space = " " * gap
    left = f"(a{name})" if nested else f"a{name}"
    source = f"y = '{name}'; x = {left}{space}{operator}{space}b"
    if "≤" in name:
        source = source.replace(left, "(a)" if nested else "a")
    operators = {(m.before, m.after) for m in candidates(source) if m.kind in FAMILIES}
    family = next(f for f in FAMILIES.values() if operator in f)
    assert operators == {(operator, other) for other in family if other != operator}

"""One-bug injection: a syntax-tree mutation that edits only the mutated source span.

Invariants: every candidate changes the syntax tree and leaves the file parseable; all text outside the span
(layout, comments, quotes) stays as it was; candidates come in source order, so a seed picks the same bug
in the same file everywhere.
"""

from __future__ import annotations

import ast
import bisect
import io
import itertools
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS = ("<", "<=", ">", ">=", "==")
ARITHMETIC = ("+", "-", "*", "//", "%")
FAMILIES: dict[str, tuple[str, ...]] = {"cmp": COMPARISONS, "arith": ARITHMETIC}
"""Binary operators that replace one another, by family."""

_OTHER: dict[str, tuple[str, ...]] = {
    "!=": ("==",),
    "in": ("not in",),
    "not in": ("in",),
    "is": ("is not",),
    "is not": ("is",),
    "and": ("or",),
    "or": ("and",),
    "/": ("*", "//"),
    "<<": (">>",),
    ">>": ("<<",),
    "&": ("|",),
    "|": ("&",),
    "**": ("*",),
    "+=": ("-=",),
    "-=": ("+=",),
    "*=": ("+=",),
}


@dataclass(frozen=True)
class Mutation:
    """A replacement of `source[start:end]`, which reads `before`, by `after` (character offsets)."""

    kind: str
    """`cmp` or `arith` (operators of one family), `operator`, `constant`, `negation`, `arguments`."""
    line: int
    """Line of the span's start, from 1."""
    start: int
    end: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        """The mutated source."""
        return source[: self.start] + self.after + source[self.end :]


class _Source:
    """Offsets of tree nodes and operator tokens in one file."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.operators: list[tuple[int, int, str]] = []
        previous: tokenize.TokenInfo | None = None
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.OP or token.string in ("and", "or", "in", "is", "not"):
                start, end = self.at(token.start), self.at(token.end)
                pair = previous is not None and (previous.string, token.string) in (
                    ("not", "in"),
                    ("is", "not"),
                )
                if pair:
                    start, _, first = self.operators.pop()
                    self.operators.append((start, end, f"{first} {token.string}"))
                else:
                    self.operators.append((start, end, token.string))
            previous = token

    def at(self, position: tuple[int, int]) -> int:
        """Offset of a tokenizer position (line, character)."""
        return self.starts[position[0] - 1] + position[1]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Offsets of a node, whose columns count UTF-8 bytes."""

        def offset(line: int, column: int) -> int:
            text = self.lines[line - 1].encode()[:column].decode()
            return self.starts[line - 1] + len(text)

        assert node.end_lineno is not None and node.end_col_offset is not None
        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)

    def between(self, left: ast.expr, right: ast.expr) -> tuple[int, int, str] | None:
        """The operator token between two nodes, parentheses passed over."""
        low, high = self.span(left)[1], self.span(right)[0]
        first = bisect.bisect_left(self.operators, (low, low, ""))
        inside = itertools.takewhile(lambda o: o[1] <= high, self.operators[first:])
        found = [o for o in inside if o[2] not in "()"]
        return found[0] if len(found) == 1 else None


def _swap(source: _Source, found: tuple[int, int, str] | None) -> Iterator[tuple[str, int, int, str]]:
    """Replacements of one operator token."""
    if found is None:
        return
    start, end, operator = found
    for kind, family in FAMILIES.items():
        if operator in family:
            yield from ((kind, start, end, other) for other in family if other != operator)
            return
    yield from (("operator", start, end, other) for other in _OTHER.get(operator, ()))


def _raw(source: _Source, node: ast.AST) -> Iterator[tuple[str, int, int, str]]:
    """Replacements (kind, start, end, text) that one node offers."""
    text = source.text
    match node:
        case ast.Compare():
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                yield from _swap(source, source.between(left, right))
        case ast.BinOp():
            yield from _swap(source, source.between(node.left, node.right))
        case ast.BoolOp():
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from _swap(source, source.between(left, right))
        case ast.AugAssign():
            yield from _swap(source, source.between(node.target, node.value))
        case ast.Constant(value=int() as value) if type(value) is int:
            start, end = source.span(node)
            if text[start:end].isdigit():
                yield from (("constant", start, end, str(value + d)) for d in (1, -1) if value + d >= 0)
        case ast.If() | ast.While() | ast.IfExp():
            start, end = source.span(node.test)
            yield "negation", start, end, f"not ({text[start:end]})"
        case ast.Call(args=[first, second], keywords=[]) if not isinstance(second, ast.Starred):
            (a, b), (c, d) = source.span(first), source.span(second)
            # Anything but a comma between them, such as a parenthesis of one, would be torn apart.
            if text[b:c].strip() == "," and text[a] != "*" and ast.dump(first) != ast.dump(second):
                yield "arguments", a, d, text[c:d] + text[b:c] + text[a:b]


def candidates(text: str, accept: Callable[[ast.AST], bool] = lambda node: True) -> list[Mutation]:
    """Every mutation of a file, in source order.

    Args:
        text: Python source.
        accept: leave out nodes (with all below them) for which this is false.

    Raises:
        SyntaxError: the source does not parse.
    """
    source = _Source(text)
    found: list[Mutation] = []

    def visit(node: ast.AST) -> None:
        # Before Python 3.12 positions in an f-string are not those of the file.
        if isinstance(node, ast.JoinedStr) or not accept(node):
            return
        for kind, start, end, after in _raw(source, node):
            line = text.count("\n", 0, start) + 1
            found.append(Mutation(kind, line, start, end, text[start:end], after))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(text))
    return sorted(found, key=lambda m: (m.start, m.end, m.kind, m.after))

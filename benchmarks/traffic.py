"""What a coding agent sends over a long trial: its whole history every time, about 1k tokens more each time.

Each wire opens as a recorded request of a real harness did (system prompt, tools, first messages); the turns
are files of Python's standard library, read, searched, tested and edited. Tool-call ids are known beforehand,
so all bodies can be made before anything is measured.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAPTURES = Path(__file__).parent.parent / "tests" / "data" / "captures"
_RESULT_TOKENS, _EDIT_LINES = 780, 8
_HOLE = "\u2063history\u2063"


@dataclass(frozen=True)
class Step:
    """One turn: what the policy says and calls, and what the tool answers."""

    text: str
    name: str
    arguments: dict[str, Any]
    result: str

    @property
    def sampled(self) -> str:
        """The reply as the policy writes it."""
        call = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"{self.text}\n<tool_call>\n{call}\n</tool_call><|im_end|>"


def make_steps(count: int, count_tokens: Callable[[str], int], seed: int = 0) -> list[Step]:
    """Turns of about 1k tokens, the same for one seed and one standard library."""
    rng = random.Random(seed)
    files = sorted(path for path in Path(ast.__file__).parent.glob("*.py") if path.stat().st_size > 20_000)
    return [_step(rng, files, count_tokens) for _ in range(count)]


def _step(rng: random.Random, files: Sequence[Path], count_tokens: Callable[[str], int]) -> Step:
    path = rng.choice(files)
    lines = path.read_text(errors="replace").splitlines()
    start = rng.randrange(max(1, len(lines) - 150))
    shown, tokens = [], 0
    for number, line in enumerate(lines[start:], start + 1):
        shown.append(f"{number:6d}\t{line}")
        tokens += count_tokens(shown[-1]) + 1
        if tokens > _RESULT_TOKENS:
            break
    file = f"/work/repository/src/{path.name}"
    old = "\n".join(lines[start : start + _EDIT_LINES])
    text = (
        f"The failing assertion goes through {path.name}, lines {start + 1} to {start + len(shown)}. "
        "I change the guard there and look at the surrounding code again before I run the tests."
    )
    edit = {"path": file, "old": old, "new": old.replace("    ", "        ", 1), "count": 1}
    return Step(text, "edit_and_show", edit, "\n".join(shown))


@dataclass(frozen=True)
class Dialect:
    """How one harness writes its requests."""

    name: str
    capture: str
    history: str
    """The field of the body that holds it."""
    call_prefix: str
    turn: Callable[[Step, str], list[dict[str, Any]]]
    """The items of a turn, given its call id."""
    marked: Callable[[dict[str, Any]], dict[str, Any]] = lambda item: item
    """How the last item of a request differs from what it is later."""

    def opening(self) -> dict[str, Any]:
        """The recorded request: path, headers, body."""
        with gzip.open(CAPTURES / self.capture, "rt") as records:
            return next(record for record in map(json.loads, records) if record["kind"] == "main")


def bodies(dialect: Dialect, steps: Sequence[Step], call_ids: Sequence[str]) -> Iterator[bytes]:
    """The body of each request: the first has no turn, the last all but one."""
    body = dialect.opening()["body"]
    history: list[dict[str, Any]] = body[dialect.history]
    head, tail = _dump({**body, dialect.history: _HOLE}).split(_dump(_HOLE))
    items, last = [_dump(item) for item in history[:-1]], history[-1]
    for step, call_id in zip(steps, call_ids, strict=True):
        yield b"".join([head, b"[", b",".join([*items, _dump(dialect.marked(last))]), b"]", tail])
        turn = dialect.turn(step, call_id)
        items += [_dump(item) for item in (last, *turn[:-1])]
        last = turn[-1]


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _chat_turn(step: Step, call_id: str) -> list[dict[str, Any]]:
    function = {"name": step.name, "arguments": json.dumps(step.arguments)}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": step.text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": step.result},
    ]


def _anthropic_turn(step: Step, call_id: str) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": call_id, "name": step.name, "input": step.arguments}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": step.result}
    return [
        {"role": "assistant", "content": [{"type": "text", "text": step.text}, call]},
        {"role": "user", "content": [result]},
    ]


def _anthropic_marked(item: dict[str, Any]) -> dict[str, Any]:
    *blocks, last = item["content"]
    return {**item, "content": [*blocks, {**last, "cache_control": {"type": "ephemeral"}}]}


def _responses_turn(step: Step, call_id: str) -> list[dict[str, Any]]:
    text = {"type": "output_text", "text": step.text}
    call = {"name": step.name, "arguments": json.dumps(step.arguments), "call_id": call_id}
    return [
        {"type": "message", "role": "assistant", "content": [text]},
        {"type": "function_call", **call},
        {"type": "function_call_output", "call_id": call_id, "output": step.result},
    ]


CLAUDE_CODE = Dialect(
    "claude_code", "claude-basic.jsonl.gz", "messages", "toolu_", _anthropic_turn, _anthropic_marked
)
OPENCODE = Dialect("opencode", "opencode-basic.jsonl.gz", "messages", "call_", _chat_turn)
CODEX = Dialect("codex", "codex-basic.jsonl.gz", "input", "call_", _responses_turn)
DIALECTS = (CLAUDE_CODE, OPENCODE, CODEX)

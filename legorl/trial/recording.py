"""Recorded traffic of a harness: a file of JSON lines, one per HTTP request, plain or gzip.

    n, t, method, path, headers [[name, value]], body, kind, scripted, status, sse [event] | response

`scripted` is what the model was made to say, in blocks: `[text, TEXT]`, `[thinking, TEXT]`, `[tool, NAME,
RAW ARGUMENTS]` (also `nstool`, with a namespace behind, and `custom`). `kind` names the speaker: main, sub,
side or compaction. Invariant: whatever the bytes are, reading gives records or an error that names the line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl.errors import UserError

Json = Any
_GZIP = b"\x1f\x8b"
_CALLS = ("tool", "nstool", "custom")
_CUT_REASONS = ("length", "max_tokens", "max_output_tokens")
_ENDS = ("[DONE]", "message_stop", "response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True)
class Block:
    """One block of the model's output: `kind` is text, thinking or call."""

    kind: str
    text: str
    """The text, or a call's raw arguments."""
    name: str = ""
    """Of a call."""


@dataclass(frozen=True)
class Record:
    """One request and what came of it."""

    n: int
    """Place in the order of arrival."""
    path: str
    """Without a query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Json
    """Decoded."""
    kind: str
    status: int
    blocks: tuple[Block, ...] | None
    """None where nothing was scripted."""
    call_ids: tuple[str, ...]
    """As issued in the recorded reply; shorter than the calls where that was cut."""
    complete: bool
    """The reply went out to its end."""
    cut_by_length: bool
    """The reply says that it ran into the token limit."""

    @property
    def raw_body(self) -> bytes:
        """The body as it may have come: JSON in UTF-8."""
        return json.dumps(self.body).encode()


def read_records(path: Path) -> list[Record]:
    """All records in order of arrival.

    Raises:
        UserError: the file is missing, unreadable, not gzip or JSON lines, or a line is no such record.
    """
    records: list[Record] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(_record(_object(json.loads(line), "the line"), len(records)))
        except (ValueError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise UserError(f"{path}, line {number}: {why}.") from error
    if not records:
        raise UserError(f"{path} holds no record.")
    return sorted(records, key=lambda record: record.n)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP):
            data = gzip.decompress(data)
        return data.decode()
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is neither gzip nor UTF-8 text: {error}.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def _record(data: Mapping[str, Json], place: int) -> Record:
    sse = data.get("sse")
    events = list(_events(_list(sse, "sse"))) if sse is not None else None
    reply: list[Json] = [data.get("response")] if events is None else events
    scripted = data.get("scripted")
    blocks = None if scripted is None else tuple(_block(item) for item in _list(scripted, "scripted"))
    gone = bool(data.get("client_gone") or data.get("mock_cut"))
    return Record(
        n=_int(data.get("n", place), "n"),
        path=_str(data.get("path"), "path").partition("?")[0],
        headers=dict(_header(item) for item in _list(data.get("headers") or [], "headers")),
        body=data.get("body"),
        kind=str(data.get("kind") or ""),
        status=_int(data.get("status") or 0, "status"),
        blocks=blocks,
        call_ids=tuple(dict.fromkeys(_call_ids(reply))),
        complete=not gone and (events is None or any(_is_end(event) for event in events)),
        cut_by_length=any(_says_length(event) for event in reply),
    )


def _block(value: Json) -> Block:
    item = _list(value, "a scripted block")
    parts = [_str(part, "a scripted block") for part in item]
    kind, *rest = [part.encode(errors="replace").decode() for part in parts] or [""]
    if kind in ("text", "thinking") and rest:
        return Block(kind, rest[0])
    if kind in _CALLS and len(rest) >= 2:
        return Block("call", rest[1], rest[0])
    raise ValueError(f"{json.dumps(value)[:80]} is no scripted block")


def _events(sse: list[Json]) -> Iterator[Json]:
    """The data of each server-sent event: decoded JSON, or the bare word of a terminator."""
    for event in sse:
        for line in _str(event, "an event").splitlines():
            if line.startswith("data:"):
                data = line[5:].strip()
                try:
                    yield json.loads(data)
                except ValueError:
                    yield data


def _is_end(event: Json) -> bool:
    return (event.get("type") if isinstance(event, dict) else event) in _ENDS


def _call_ids(value: Json) -> Iterator[str]:
    """Ids of tool calls anywhere in a reply, in order: a chat's calls, content blocks, or output items."""
    if isinstance(value, list):
        for item in value:
            yield from _call_ids(item)
    elif isinstance(value, dict):
        kind, id, call_id = value.get("type"), value.get("id"), value.get("call_id")
        if kind in ("function_call", "custom_tool_call") and isinstance(call_id, str):
            yield call_id
        elif kind in ("function", "tool_use") and isinstance(id, str):
            yield id
        else:
            for item in value.values():
                yield from _call_ids(item)


def _says_length(value: Json) -> bool:
    if isinstance(value, list):
        return any(_says_length(item) for item in value)
    if not isinstance(value, dict):
        return False
    reasons = (value.get(name) for name in ("finish_reason", "stop_reason", "reason"))
    return any(reason in _CUT_REASONS for reason in reasons if isinstance(reason, str)) or any(
        _says_length(value.get(name))
        for name in ("choices", "delta", "message", "response", "incomplete_details")
    )


def _header(value: Json) -> tuple[str, str]:
    item = _list(value, "a header")
    if len(item) != 2:
        raise ValueError(f"{json.dumps(value)[:80]} is no header")
    return _str(item[0], "a header's name").lower(), _str(item[1], "a header's value")


def _object(value: Json, what: str) -> Mapping[str, Json]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, not an object")
    return value


def _list(value: Json, what: str) -> list[Json]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is {type(value).__name__}, not a list")
    return value


def _str(value: Json, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {type(value).__name__}, not a string")
    return value


def _int(value: Json, what: str) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{what} is {type(value).__name__}, not a number")
    return value

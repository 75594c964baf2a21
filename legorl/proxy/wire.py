"""What a wire format is, and the checks that all of them share.

A wire is one file that parses a request into `messages.ChatRequest` and renders replies, streams and errors
from the same model. It holds no state: what a stream has said before, it is told as a count of heartbeats.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from legorl.proxy.body import Element
from legorl.proxy.messages import ChatRequest, Json, Message, Reply
from legorl.proxy.refusal import Reason, Refusal, invalid

T = TypeVar("T")

_NO_CHOICE = ("auto", {"type": "auto"})
_WISH_LENGTH = 500
_SCHEMA_DEPTH = 64
PLACEHOLDER = "[{} omitted: this model reads text only]"


class WireFormat(ABC):
    """One protocol."""

    call_id_prefix: str
    """Tool-call ids are issued with the protocol's customary prefix."""

    @abstractmethod
    def parse(self, body: Mapping[str, Json]) -> ChatRequest:
        """Read a request body. Raises `Refusal` (invalid) naming the field."""

    @abstractmethod
    def reply(self, reply: Reply, request: ChatRequest) -> Json:
        """The body of a reply that is not streamed."""

    @abstractmethod
    def heartbeat(self, request: ChatRequest, beats: int) -> bytes:
        """Events that keep a stream alive and change nothing; `beats` went out before."""

    @abstractmethod
    def events(self, reply: Reply, request: ChatRequest, beats: int = 0) -> Iterator[bytes]:
        """The server-sent events of a streamed reply, behind `beats` heartbeats."""

    @abstractmethod
    def error(self, refusal: Refusal) -> Json:
        """The body of an error."""

    @abstractmethod
    def error_event(self, refusal: Refusal, request: ChatRequest, beats: int = 0) -> bytes:
        """An error at the end of a stream, behind `beats` heartbeats."""

    def refuses_in_stream(self, reason: Reason) -> bool:
        """Whether clients of a stream know this error only as an event, and not as an HTTP status."""
        return False

    @abstractmethod
    def token_count(self, count: int) -> Json:
        """The body of an answer to the protocol's question how long a prompt is."""

    @abstractmethod
    def models(self) -> Json:
        """The list of models: one, though any name is accepted."""


def compact(value: Json) -> bytes:
    """JSON as it goes over the wire."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def sse(value: Json, name: str = "") -> bytes:
    """One server-sent event."""
    data = b"data: " + compact(value) + b"\n\n"
    return f"event: {name}\n".encode() + data if name else data


def object_of(arguments: str) -> dict[str, Json] | None:
    """The JSON object that a policy's argument text is; None for any other text (`NaN` is none)."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def has_text(message: Message) -> bool:
    """Whether a reply's text is worth a block of its own."""
    return bool(message.text.strip()) if message.calls or message.reasoning else bool(message.text)


def want_list(value: Json, where: str) -> Sequence[Json]:
    """`value` as a list, or a refusal that names the field."""
    if not isinstance(value, list):
        raise invalid(f"{where}: expected a list, got {type(value).__name__}")
    return value


def want_object(value: Json, where: str) -> Mapping[str, Json]:
    """`value` as an object, or a refusal that names the field."""
    if not isinstance(value, dict):
        raise invalid(f"{where}: expected an object, got {type(value).__name__}")
    return value


def want_schema(value: Json, where: str) -> Mapping[str, Json]:
    """`value` as a tool's schema ({} for null), or a refusal that names the field.

    Its depth is bounded: what is accepted is rendered and kept, wherever that happens on the stack.
    """
    schema = want_object({} if value is None else value, where)
    level: list[Json] = [schema]
    for _ in range(_SCHEMA_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return schema
    raise invalid(f"{where}: nested more than {_SCHEMA_DEPTH} levels deep")


def want_text(value: Json, where: str) -> str:
    """`value` as a string ("" for null), or a refusal that names the field."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid(f"{where}: expected a string, got {type(value).__name__}")
    return value


def want_name(value: Json, where: str) -> str:
    """`value` as a string that is not empty, or a refusal that names the field."""
    text = want_text(value, where)
    if not text:
        raise invalid(f"{where}: expected a string that is not empty")
    return text


def want_flag(value: Json, where: str) -> bool:
    """`value` as a boolean (False for null), or a refusal that names the field."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid(f"{where}: expected a boolean, got {type(value).__name__}")
    return value


def read_each(values: Json, where: str, read: Callable[[Json], T]) -> list[T]:
    """Read the items of a list ([] for null); a refusal from inside one is given its place.

    `read` depends on its argument alone: what it made of an element is kept for the next request. Places are
    put together only when something is wrong: a long history is read on every request.
    """
    items: list[T] = []
    try:
        for value in want_list([] if values is None else values, where):
            items.append(value.read_with(read) if isinstance(value, Element) else read(value))
    except Refusal as refusal:
        if isinstance(values, list):
            raise invalid(f"{where}[{len(items)}].{refusal.message}") from None
        raise
    return items


def want_messages(body: Mapping[str, Json]) -> Sequence[Json]:
    """The request's message list, not empty."""
    raw = want_list(body.get("messages"), "messages")
    if not raw:
        raise invalid("messages: at least one message is required")
    return raw


def wishes_of(body: Mapping[str, Json], names: Mapping[str, str]) -> dict[str, Json]:
    """The sampling parameters a body asks for; `names` maps the wire's names to ours."""
    wishes = {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
    if wishes.get("tool_choice") in _NO_CHOICE:
        del wishes["tool_choice"]
    return {name: _for_the_record(value) for name, value in wishes.items()}


def note_withheld(wishes: dict[str, Json], withheld: Sequence[str], offered: int) -> None:
    """Put tools that only a provider can run or describe among the wishes: the policy is not offered them.

    Raises:
        Refusal: they are all the request has: it can only be answered with their results.
    """
    if withheld and not offered:
        raise invalid(f"tools: {', '.join(withheld)}: defined by a provider, which this endpoint is not")
    if withheld:
        wishes["withheld_tools"] = _for_the_record(sorted(withheld))


def _for_the_record(value: Json) -> Json:
    """A wish as it is kept: small, whatever a client sends."""
    if isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(text) <= _WISH_LENGTH else text[:_WISH_LENGTH] + "…"

"""What a wire format is, and the checks that all of them share.

A wire is one file that parses a request into `messages.ChatRequest` and renders replies, streams and errors
from the same model. It holds no state.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from legorl.proxy.body import Element
from legorl.proxy.messages import ChatRequest, Json, Reply
from legorl.proxy.refusal import Refusal, invalid

T = TypeVar("T")

PLACEHOLDER = "[{} omitted: this model reads text only]"


class WireFormat(ABC):
    """One protocol."""

    call_id_prefix: str
    """Tool-call ids are issued with the protocol's customary prefix."""
    heartbeat: bytes
    """Bytes that keep a stream alive and mean nothing."""

    @abstractmethod
    def parse(self, body: Mapping[str, Json]) -> ChatRequest:
        """Read a request body. Raises `Refusal` (invalid) naming the field."""

    @abstractmethod
    def reply(self, reply: Reply, request: ChatRequest) -> Json:
        """The body of a reply that is not streamed."""

    @abstractmethod
    def events(self, reply: Reply, request: ChatRequest) -> Iterator[bytes]:
        """The server-sent events of a streamed reply."""

    @abstractmethod
    def error(self, refusal: Refusal) -> Json:
        """The body of an error."""

    @abstractmethod
    def error_event(self, refusal: Refusal) -> bytes:
        """An error that comes after a stream has begun."""


def compact(value: Json) -> bytes:
    """JSON as it goes over the wire."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


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
    return {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}

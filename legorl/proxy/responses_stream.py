"""The Responses protocol's own objects: the response, and the events of a stream, numbered."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from legorl.proxy.messages import Json
from legorl.proxy.wire import sse


@dataclass(frozen=True)
class Head:
    """What a response is called, before there is a reply."""

    model: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


def response_object(head: Head, status: str, output: list[dict[str, Json]]) -> dict[str, Json]:
    """The response object. Required fields that only repeat the request say what every request gets here."""
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": head.model,
        "output": output,
        "parallel_tool_calls": True,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


class Stream:
    """Numbers the events of one stream; the first heartbeat had two."""

    def __init__(self, beats: int) -> None:
        self._next = beats + 1 if beats else 0

    def event(self, kind: str, **fields: Json) -> bytes:
        """One event."""
        data = sse({"type": kind, "sequence_number": self._next, **fields}, kind)
        self._next += 1
        return data

    def opening(self, head: Head) -> bytes:
        """The response is announced."""
        response = response_object(head, "in_progress", [])
        created = self.event("response.created", response=response)
        return created + self.event("response.in_progress", response=response)

    def item(self, index: int, item: dict[str, Json]) -> Iterator[bytes]:
        """An output item, opened, filled and closed."""
        empty: dict[str, Json] = {"status": "in_progress"}
        place = {"item_id": item["id"], "output_index": index}
        match item["type"]:
            case "reasoning":
                (part,) = item["summary"]
                empty["summary"], parts = [], {**place, "summary_index": 0}
                inner = [
                    ("reasoning_summary_part.added", parts | {"part": part | {"text": ""}}),
                    ("reasoning_summary_text.delta", parts | {"delta": part["text"]}),
                    ("reasoning_summary_text.done", parts | {"text": part["text"]}),
                    ("reasoning_summary_part.done", parts | {"part": part}),
                ]
            case "message":
                (part,) = item["content"]
                empty["content"], parts = [], {**place, "content_index": 0}
                inner = [
                    ("content_part.added", parts | {"part": part | {"text": ""}}),
                    ("output_text.delta", parts | {"delta": part["text"], "logprobs": []}),
                    ("output_text.done", parts | {"text": part["text"], "logprobs": []}),
                    ("content_part.done", parts | {"part": part}),
                ]
            case "custom_tool_call":
                empty["input"] = ""
                inner = [
                    ("custom_tool_call_input.delta", place | {"delta": item["input"]}),
                    ("custom_tool_call_input.done", place | {"input": item["input"]}),
                ]
            case _:
                empty["arguments"] = ""
                done = {"name": item["name"], "arguments": item["arguments"]}
                inner = [
                    ("function_call_arguments.delta", place | {"delta": item["arguments"]}),
                    ("function_call_arguments.done", place | done),
                ]
        added = item | empty
        yield self.event("response.output_item.added", output_index=index, item=added)
        for kind, fields in inner:
            yield self.event(f"response.{kind}", **fields)
        yield self.event("response.output_item.done", output_index=index, item=item)

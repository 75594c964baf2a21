"""Reads the tool calls of replies that are written in the tiny policy's own template.

Invariant: what `write_call` wrote comes back as it was; a block that is no such call makes the reply text. A
model's replies are read by vLLM's parser of that model (`legorl.engine.vllm_parser`), never by this.
"""

from __future__ import annotations

import json

from legorl.engine.base import Parsed, ToolCall
from legorl.policy.template import CALL_END, CALL_START


class WrittenCalls:
    """A `ReplyParser`."""

    def parse(self, text: str) -> Parsed:
        """See `ReplyParser.parse`."""
        head, *blocks = text.split(CALL_START)
        calls = []
        for block in blocks:
            try:
                call = json.loads(block.split(CALL_END)[0])
                calls.append(ToolCall(str(call["name"]), json.dumps(call["arguments"], ensure_ascii=False)))
            except (ValueError, KeyError, TypeError):
                return Parsed(text)
        return Parsed(head.strip(), tuple(calls))

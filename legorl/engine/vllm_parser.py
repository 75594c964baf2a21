"""vLLM's own tool-call parsers, by name, behind `ReplyParser`.

Invariant: what counts as a tool call in training is what vLLM would serve; a reply that its parser rejects
stays text.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from legorl.engine.base import Parsed, ToolCall
from legorl.errors import UserError


class VllmParser:
    """One of vLLM's tool parsers. Made by `vllm_parser`."""

    def __init__(self, parser_class: Any, tokenizer: Any) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._class = parser_class
        self._tokenizer = tokenizer
        self._request = ChatCompletionRequest(messages=[], model="policy")

    def parse(self, text: str) -> Parsed:
        """See `ReplyParser.parse`."""
        # A fresh parser each time: some keep streaming state, and their construction is cheap.
        found = self._class(self._tokenizer).extract_tool_calls(text, self._request)
        calls = tuple(ToolCall(call.function.name, call.function.arguments) for call in found.tool_calls)
        return Parsed(found.content or "", calls) if calls else Parsed(text)


def vllm_parser(name: str, model_dir: Path) -> VllmParser:
    """The tool parser `name` for the tokenizer of `model_dir`.

    Raises:
        UserError: no such parser, no vLLM, or the parser cannot work with this tokenizer.
    """
    try:
        from transformers import AutoTokenizer
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise UserError(
            f"vLLM is not installed ({error}): install legorl with the extra cpu or gpu."
        ) from error
    known = ToolParserManager.list_registered()
    if name not in known:
        raise UserError(f"model.tool_parser={name} is not a parser of vLLM. It has: {', '.join(known)}.")
    # A malformed call is the policy's doing and an everyday event; vLLM logs a traceback for each.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        parser_class = ToolParserManager.get_tool_parser(name)
        parser_class(tokenizer)
    except Exception as error:  # parsers raise what they like when a token they need is not there
        raise UserError(f"model.tool_parser={name} cannot work with {model_dir}: {error}.") from error
    return VllmParser(parser_class, tokenizer)

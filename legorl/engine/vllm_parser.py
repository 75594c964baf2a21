"""vLLM's own tool-call and reasoning parsers, by name, behind `ReplyParser`.

Invariant: what counts as a tool call in training is what vLLM would serve; a reply that its parser rejects
stays text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from legorl.config.schema import ModelConfig
from legorl.engine.base import Parsed, ToolCall
from legorl.errors import UserError

logger = logging.getLogger(__name__)


class VllmParser:
    """One of vLLM's tool parsers, behind one of its reasoning parsers where the policy thinks."""

    def __init__(self, tool_class: Any, reasoning_class: Any, tokenizer: Any) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._tools = tool_class
        self._reasoning = reasoning_class
        self._tokenizer = tokenizer
        self._request = ChatCompletionRequest(messages=[], model="policy")

    def parse(self, text: str) -> Parsed:
        """See `ReplyParser.parse`."""
        try:
            return self._parse(text)
        except Exception as error:
            # What a parser cannot read is the policy's doing and no failure of ours: it stays text.
            logger.debug("vLLM's parser raised %r on %r", error, text)
            return Parsed(text)

    def _parse(self, text: str) -> Parsed:
        # A fresh parser each time: some keep streaming state, and their construction is cheap.
        reasoning, content = "", text
        if self._reasoning is not None:
            thought, rest = self._reasoning(self._tokenizer).extract_reasoning(text, self._request)
            reasoning, content = thought or "", rest or ""
        found = self._tools(self._tokenizer).extract_tool_calls(content, self._request)
        calls = tuple(ToolCall(call.function.name, call.function.arguments) for call in found.tool_calls)
        return Parsed((found.content or "") if calls else content, calls, reasoning)


def vllm_parser(model: ModelConfig, model_dir: Path) -> VllmParser:
    """The parsers that `model` names, for the tokenizer of `model_dir`.

    Raises:
        UserError: no such parser, no vLLM, or a parser cannot work with this tokenizer.
    """
    try:
        from transformers import AutoTokenizer
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise UserError(
            f"vLLM is not installed ({error}): install legorl with the extra cpu or gpu."
        ) from error
    # A malformed call is the policy's doing and an everyday event; vLLM logs a traceback for each.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:  # transformers raises what it likes
        raise UserError(f"The tokenizer of {model_dir} cannot be loaded: {error}.") from error

    def checked(key: str, name: str, known: list[str], get: Callable[[str], Any]) -> Any:
        if name not in known:
            raise UserError(f"model.{key}={name} is not a parser of vLLM. It has: {', '.join(known)}.")
        try:
            parser_class = get(name)
            parser_class(tokenizer)
        except Exception as error:  # parsers raise what they like when a token they need is not there
            raise UserError(f"model.{key}={name} cannot work with {model_dir}: {error}.") from error
        return parser_class

    tools = checked(
        "tool_parser",
        model.tool_parser,
        ToolParserManager.list_registered(),
        ToolParserManager.get_tool_parser,
    )
    reasoning = None
    if model.reasoning_parser:
        reasoning = checked(
            "reasoning_parser",
            model.reasoning_parser,
            ReasoningParserManager.list_registered(),
            ReasoningParserManager.get_reasoning_parser,
        )
    return VllmParser(tools, reasoning, tokenizer)

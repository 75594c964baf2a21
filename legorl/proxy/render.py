"""From messages to token ids, piece by piece: only what is new is rendered and tokenised.

Invariant: appending `following(...)` to a context gives the tokens of the whole conversation, with every
sampled turn left exactly as it was sampled. New messages are rendered behind a short stand-in conversation
whose last message is a marker: what the template prints after the marker is the marker message's end tail
and the new messages, whatever stood before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import jinja2
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from legorl.errors import UserError
from legorl.proxy.messages import Message, Role, Tool, ToolUse
from legorl.proxy.refusal import invalid
from legorl.proxy.template import compile_template, message_for_template, read_template, tools_for_template

Ids = NDArray[np.int32]

_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError)
"""What a template can raise on messages it was not written for."""
_MARKER = "\u2063marker\u2063"
_USER = Message(Role.USER, "u")
_STAND_IN: dict[Role, tuple[Message, ...]] = {
    Role.SYSTEM: (Message(Role.SYSTEM, _MARKER),),
    Role.USER: (Message(Role.USER, _MARKER),),
    Role.ASSISTANT: (_USER, Message(Role.ASSISTANT, _MARKER)),
    Role.TOOL: (
        _USER,
        Message(Role.ASSISTANT, "", calls=(ToolUse("call_000", "t", "{}"),)),
        Message(Role.TOOL, _MARKER, call_id="call_000"),
    ),
}
_STAND_IN_TOOLS = (Tool("t", "", {"type": "object", "properties": {}}),)


@dataclass(frozen=True, slots=True)
class Prior:
    """What a context ends with: a message of `role`, complete or as it was sampled."""

    role: Role
    sampled: bool = False
    ended: bool = True
    """Of a sampled turn: its last token is the template's end-of-turn token."""


class Renderer:
    """The tokenizer and chat template of one model."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, special: dict[str, str], model_dir: Path | None
    ) -> None:
        self.tokenizer = tokenizer
        self.model_dir = model_dir
        self._tails: dict[tuple[Role, bool], str] = {}
        try:
            self._render = compile_template(template, special)
            self.generation_prompt = self._generation_prompt()
            self.end_tail = self._tail(Role.ASSISTANT, False)
        except jinja2.TemplateError as error:
            raise UserError(f"The chat template of {model_dir} cannot be used: {error}.") from error
        self.generation_ids = self.encode(self.generation_prompt)
        first = self.tokenizer.encode(self.end_tail, add_special_tokens=False)
        self.end_id = int(first.ids[0]) if first.ids else -1
        self._end_text = first.tokens[0] if first.ids else ""

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """Read `tokenizer.json` and the chat template of a Hugging Face directory.

        Raises:
            UserError: a file is missing or unusable.
        """
        file = model_dir / "tokenizer.json"
        if not file.exists():
            raise UserError(f"{file} does not exist: the model directory needs a fast tokenizer.")
        template, special = read_template(model_dir)
        return cls(Tokenizer.from_file(str(file)), template, special, model_dir)

    def encode(self, text: str) -> Ids:
        """Token ids of `text`, special tokens recognised, none added. int32 [n]."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: Ids) -> str:
        """Text of a reply, without special tokens."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], generation: bool = False) -> str:
        """The conversation as the template prints it."""
        shown = [message_for_template(message) for message in messages]
        return self._render(shown, tools_for_template(tools), generation)

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """A conversation from its beginning, without a generation prompt. int32 [n].

        Raises:
            Refusal: the template does not accept these messages.
        """
        try:
            return self.encode(self.text(messages, tools))
        except _TEMPLATE_ERRORS as error:
            raise invalid(f"messages: the model's chat template refuses them: {error}") from error

    def render_full(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """The whole prompt of a conversation, generation prompt included. int32 [n]."""
        return np.concatenate([self.opening(messages, tools), self.generation_ids])

    def following(self, prior: Prior, messages: Sequence[Message], has_tools: bool) -> Ids | None:
        """What to append to a context that ends with `prior` so that `messages` follow. int32 [n].

        Without `messages` it is what completes the prior turn. None where the template does not print
        the prior message the same way when these messages follow (a run of tool results, say): render from
        an earlier message then.
        """
        try:
            text = self._after_marker(prior.role, messages, has_tools)
            if text is None:
                return None
            if not prior.sampled:
                printed = self._tail(prior.role, has_tools)
            else:
                printed = self._end_text if prior.ended else ""
        except _TEMPLATE_ERRORS:
            return None
        return self.encode(text[len(printed) :]) if text.startswith(printed) else None

    def _after_marker(self, role: Role, messages: Sequence[Message], has_tools: bool) -> str | None:
        tools = _STAND_IN_TOOLS if has_tools else ()
        _, marker, after = self.text([*_STAND_IN[role], *messages], tools).partition(_MARKER)
        return after if marker else None

    def _tail(self, role: Role, has_tools: bool) -> str:
        key = (role, has_tools)
        if key not in self._tails:
            after = self._after_marker(role, (), has_tools)
            if after is None:
                raise jinja2.TemplateError(f"it does not print the text of a {role} message")
            self._tails[key] = after
        return self._tails[key]

    def _generation_prompt(self) -> str:
        plain, prompted = self.text([_USER], ()), self.text([_USER], (), generation=True)
        if not prompted.startswith(plain) or prompted == plain:
            raise jinja2.TemplateError("add_generation_prompt does not append a prompt for the assistant")
        return prompted[len(plain) :]

"""Before anything is spent: can this model's chat template and this parser work together, turn by turn?"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from legorl.engine.base import ReplyParser
from legorl.errors import UserError
from legorl.proxy.messages import Message, Role, Tool, ToolUse
from legorl.proxy.refusal import Refusal
from legorl.proxy.render import Prior, Renderer

_TOOL = Tool(
    "run_probe",
    "Run a command.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)
_ARGUMENTS = '{"command": "ls -la"}'
_CALL = Message(Role.ASSISTANT, "", calls=(ToolUse("call00001", _TOOL.name, _ARGUMENTS),))
_START = (Message(Role.SYSTEM, "You are a probe."), Message(Role.USER, "List the files."))
_NEXT: tuple[tuple[str, tuple[Message, ...]], ...] = (
    ("a tool result", (Message(Role.TOOL, "a.py\nb.py", call_id="call00001"),)),
    ("a user message", (Message(Role.USER, "Go on."),)),
)


@dataclass(frozen=True)
class TemplateReport:
    """What the check found."""

    prefix_preserving: bool
    """Rendering a longer history anew gives the tokens of appending to the shorter one. Where it does not (a
    template that drops old reasoning), the policy still sees its turns as it sampled them."""
    end_token: str
    """What ends an assistant's turn."""
    end_tail: str
    """What the template prints after an assistant's text."""
    generation_prompt: str


def check_template(renderer: Renderer, parser: ReplyParser) -> TemplateReport:
    """Probe the template with a short conversation with tools.

    Raises:
        UserError: it cannot work, and why.
    """
    where = f"The chat template of {renderer.model_dir}"
    if renderer.end_id not in _special_ids(renderer):
        raise UserError(
            f"{where} ends an assistant's turn with {renderer.end_tail!r}, which does not begin with a "
            "special token, so the end of a turn cannot be told from its text. Use a template that has one."
        )
    preserving = True
    for name, messages in _NEXT:
        for assistant in (_CALL, Message(Role.ASSISTANT, "There are two.")):
            if messages[0].role is Role.TOOL and not assistant.calls:
                continue
            preserving &= _probe(renderer, where, name, assistant, messages)
    _round_trip(renderer, parser, where)
    return TemplateReport(
        prefix_preserving=preserving,
        end_token=str(renderer.tokenizer.id_to_token(renderer.end_id)),
        end_tail=renderer.end_tail,
        generation_prompt=renderer.generation_prompt,
    )


def _probe(
    renderer: Renderer, where: str, name: str, assistant: Message, messages: tuple[Message, ...]
) -> bool:
    tools = (_TOOL,)
    try:
        full = renderer.render_full((*_START, assistant, *messages), tools)
        shorter = renderer.render_full(_START, tools)
        complete = renderer.opening((*_START, assistant), tools)
    except Refusal as refusal:
        raise UserError(f"{where} cannot render {name} after a tool call: {refusal.message}.") from refusal
    following = renderer.following(Prior(Role.ASSISTANT, sampled=True), messages, has_tools=True)
    if following is None:
        raise UserError(
            f"{where} prints an assistant's turn differently when {name} follows it, so a history cannot be "
            "continued. Use a template that appends."
        )
    if messages[0].text not in renderer.decode(following):
        raise UserError(f"{where} does not print the text of {name}. Use a template made for tool calls.")
    ends = np.flatnonzero(complete == renderer.end_id)
    sampled = complete[len(shorter) : int(ends[-1]) + 1] if len(ends) else complete[:0]
    appended = np.concatenate([shorter, sampled, following, renderer.generation_ids])
    return np.array_equal(full, appended)


def _round_trip(renderer: Renderer, parser: ReplyParser, where: str) -> None:
    prompt = renderer.text(_START, (_TOOL,), generation=True)
    complete = renderer.text((*_START, _CALL), (_TOOL,))
    if not complete.startswith(prompt):
        prompt = renderer.text(_START, (_TOOL,))
    reply = renderer.decode(renderer.encode(complete[len(prompt) :].removesuffix(renderer.end_tail)))
    parsed = parser.parse(reply)
    if len(parsed.calls) != 1:
        raise UserError(
            f"{where} prints a tool call as {reply!r}, in which the tool parser finds {len(parsed.calls)} "
            "calls. Set model.tool_parser to the parser of this model's family."
        )
    call = parsed.calls[0]
    if call.name != _TOOL.name or json.loads(call.arguments) != json.loads(_ARGUMENTS):
        raise UserError(
            f"{where} prints a tool call as {reply!r}, which the tool parser reads as "
            f"{call.name}({call.arguments}). Set model.tool_parser to the parser of this model's family."
        )


def _special_ids(renderer: Renderer) -> set[int]:
    added = renderer.tokenizer.get_added_tokens_decoder()
    return {int(id) for id, token in added.items() if token.special}

"""A model's own chat template, rendered as Hugging Face does, without transformers.

Invariant: for the same messages and tools the text equals that of `apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from legorl.errors import UserError
from legorl.proxy.messages import Json, Message, Role, Tool

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant writes; for rendering it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def compile_template(source: str, special: dict[str, str]) -> Callable[..., str]:
    """Compile a chat template; the function takes `messages, tools, add_generation_prompt`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    template = environment.from_string(source)

    def render(messages: Json, tools: Json, add_generation_prompt: bool) -> str:
        return template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special,
        )

    return render


def read_template(model_dir: Path) -> tuple[str, dict[str, str]]:
    """The chat template of a model directory and its named special tokens.

    Raises:
        UserError: there is none, or a file is unreadable.
    """
    config_file = model_dir / "tokenizer_config.json"
    try:
        config: dict[str, Any] = json.loads(config_file.read_text()) if config_file.exists() else {}
    except ValueError as error:
        raise UserError(f"{config_file} is not valid JSON: {error}.") from error
    special = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if value is not None:
            special[name] = value["content"] if isinstance(value, dict) else str(value)
    separate = model_dir / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(), special
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use", named.get("default"))
    if not isinstance(template, str):
        raise UserError(
            f"{model_dir} has no chat template: neither chat_template.jinja nor a chat_template in "
            "tokenizer_config.json. Use an instruction-tuned model, or put its template there."
        )
    return template, special


def message_for_template(message: Message) -> dict[str, Json]:
    """A message as templates expect it: arguments as an object where they are one."""
    data: dict[str, Json] = {"role": message.role.value, "content": message.text}
    if message.reasoning:
        data["reasoning_content"] = message.reasoning
    if message.calls:
        data["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.calls
        ]
    if message.role is Role.TOOL:
        data["tool_call_id"] = message.call_id
    return data


def _arguments(text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def tools_for_template(tools: Sequence[Tool]) -> list[Json] | None:
    """Tools in OpenAI's function style, None when there are none."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            },
        }
        for tool in tools
    ]

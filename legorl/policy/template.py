"""Chat template of the tiny policy: ChatML with Qwen's tools block and hermes tool calls.

Invariant: rendering is prefix-preserving. The text of messages[:k] is a prefix of the text of messages for
every k >= 1, so a conversation can be extended without touching the tokens before it. That is why every tool
result is a user turn of its own (Qwen merges neighbours) and nothing looks ahead or strips earlier turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CALL_START = "<tool_call>"
CALL_END = "</tool_call>"

TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

CHAT_TEMPLATE = (
    """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part if part is string else part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set first_is_system = messages and messages[0].role == 'system' -%}
{%- if tools or first_is_system -%}
{{- '<|im_start|>system\\n' -}}
{%- if first_is_system -%}{{- text(messages[0].content) -}}{%- endif -%}
{%- if tools -%}
{%- if first_is_system -%}{{- '\\n\\n' -}}{%- endif -%}
{{- """
    + json.dumps(TOOLS_HEAD)
    + """ -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- """
    + json.dumps(TOOLS_TAIL)
    + """ -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- if not loop.first or text(message.content) -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif not (loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)


def to_json(value: object) -> str:
    """The `tojson` filter as `transformers` defines it; jinja's own escapes `<`, `>`, `&`, `'` for HTML."""
    return json.dumps(value, ensure_ascii=False)


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Text of a conversation, as `transformers`' `apply_chat_template` gives it."""
    return _compiled().render(
        messages=list(messages), tools=list(tools), add_generation_prompt=add_generation_prompt
    )


@cache
def _compiled() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    return environment.from_string(CHAT_TEMPLATE)

"""Chat templates in the manner of several model families, with parsers for the calls that they print.

Written for these tests: each has the family's habits that matter here (what ends a turn, where tools and
results go, what is merged, dropped, trimmed or refused), not its wording.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from legorl.engine.base import Parsed, ReplyParser, ToolCall
from tests.proxy.models import HermesLike, build_tokenizer

QWEN3 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string
                else call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""Drops the thoughts of earlier turns; puts an empty thought into the last one."""

THINKER = QWEN3.replace(
    "'<|im_start|>assistant\\n' }}{%- endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
"""The same with a prompt that opens the thought."""

HERMES = r"""{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\nYou may call these functions: <tools> ' }}
    {%- for tool in tools %}{{- tool.function | tojson + '\n' }}{%- endfor %}
    {{- '</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- set written = {'name': call.function.name, 'arguments': call.function.arguments} %}
            {{- '\n<tool_call>\n' + (written | tojson) + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""A token at the very beginning; a role of its own for results."""

SMOLLM = r"""{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
    {%- if loop.first and tools %}
        {{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {{- message.content }}
    {%- if message.tool_calls %}{{- '<tool_call>' }}
        {%- for call in message.tool_calls %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {%- if not loop.last %}{{- '</tool_call><tool_call>' }}{%- endif %}
        {%- endfor %}{{- '</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""A system prompt of its own where there is none."""

LLAMA = r"""{{- bos_token }}
{%- for message in messages %}
    {%- if loop.first and tools %}
        {{- '<|start_header_id|>system<|end_header_id|>\n\n' + (tools | tojson) + '<|eot_id|>' }}
    {%- endif %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{- raise_exception('only one call at a time') }}{%- endif %}
        {%- set function = message.tool_calls[0].function %}
        {{- '{"name": "' + function.name + '", "parameters": ' + (function.arguments | tojson) + '}' }}
    {%- else %}{{- message.content | trim }}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
"""No line break between turns; trims texts; refuses several calls."""

STRICT = r"""{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('system comes first') }}
    {%- endif %}
    {%- if message.role == 'user' and loop.index0 and messages[loop.index0 - 1].role == 'user' %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""Refuses neighbours of one role."""


class LlamaLike:
    """A call is a reply that is nothing but one JSON object."""

    def parse(self, text: str) -> Parsed:
        """See `ReplyParser.parse`."""
        try:
            call = json.loads(text)
            return Parsed("", (ToolCall(call["name"], json.dumps(call["parameters"])),))
        except (ValueError, KeyError, TypeError):
            return Parsed(text)


class ThinkingHermes(HermesLike):
    """Thoughts taken out first; the prompt may have opened them."""

    def parse(self, text: str) -> Parsed:
        """See `ReplyParser.parse`."""
        thought, found, rest = text.rpartition("</think>")
        parsed = super().parse(rest.lstrip("\n"))
        return Parsed(parsed.text, parsed.calls, re.sub("<think>", "", thought).strip()) if found else parsed


@dataclass(frozen=True)
class Family:
    """A template and what goes with it."""

    template: str
    parser: ReplyParser
    preserving: bool
    end: str
    call: str
    """A reply with a call, as the model writes it."""


_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
_JSON_CALL = '{"name": "bash", "parameters": {"command": "ls"}}'
_END = "<|im_end|>"
FAMILIES = {
    "qwen3": Family(QWEN3, ThinkingHermes(), False, _END, f"<think>\nHm.\n</think>\n\nLook.\n{_CALL}"),
    "thinker": Family(THINKER, ThinkingHermes(), False, _END, f"Hm.\n</think>\n\n{_CALL}"),
    "hermes": Family(HERMES, HermesLike(), True, _END, f"Look.\n{_CALL}"),
    "smollm": Family(SMOLLM, HermesLike(), True, _END, f"Look. {_CALL}"),
    "llama": Family(LLAMA, LlamaLike(), True, "<|eot_id|>", _JSON_CALL),
    "strict": Family(STRICT, HermesLike(), True, _END, _CALL),
}


def write_family(directory: Path, family: Family) -> Path:
    """A model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    special = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in ("<think>", "</think>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(family.template)
    config = {"bos_token": "<|begin_of_text|>", "eos_token": family.end, "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    return directory

"""A tiny tokenizer with a ChatML template and Qwen's tool calls, and a parser for them, for tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from legorl.engine.base import Parsed, ToolCall

CHATML = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
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

_CORPUS = (
    "def check(value, limit):\n    return value <= limit\n",
    "The tests of `check` fail. Please list the files of the repository and fix the bug.",
    '{"name": "bash", "arguments": {"command": "python check.py"}}',
    "user assistant system tools 1 2 3 4 passed failed error: no output",
)


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 400 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=1,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    added = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    return tokenizer


def write_model(directory: Path, template: str = CHATML) -> Path:
    """A model directory as the renderer and transformers read it."""
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 100000,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


class HermesLike:
    """Tool calls as vLLM's hermes parser reads them, without vLLM, and a thought in front of the reply."""

    _THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
    _CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)

    def parse(self, text: str) -> Parsed:
        """See `ReplyParser.parse`."""
        thought = self._THOUGHT.match(text)
        reasoning = thought[1] if thought else ""
        text = text[thought.end() :] if thought else text
        if "<tool_call>" not in text:
            return Parsed(text, reasoning=reasoning)
        try:
            found = [json.loads(closed or rest) for closed, rest in self._CALL.findall(text)]
            calls = tuple(
                ToolCall(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in found
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return Parsed(text, reasoning=reasoning)
        return Parsed(text[: text.find("<tool_call>")], calls, reasoning)


def call_text(name: str, arguments: str, text: str = "") -> str:
    """A reply with one tool call, as the policy writes it."""
    body = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f"{text}\n{body}" if text else body

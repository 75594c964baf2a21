"""Byte-level BPE tokenizer of the tiny policy, written as a Hugging Face directory.

Invariant: fixed strings of the conversation are one token each, so that every decision of the policy (which
command, which operator, tests or not) is one token; the vocabulary ends where `len(tokenizer)` says.
Numbers are split from words and learned whole, so a line number is one token wherever it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (  # type: ignore[import-untyped]
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

from legorl.policy.commands import AND_TEST, EDIT_END, EDIT_START, PATTERN, SUBMIT, TEST
from legorl.policy.template import (
    CALL_END,
    CALL_START,
    CHAT_TEMPLATE,
    END_OF_TEXT,
    TOOLS_HEAD,
    TOOLS_TAIL,
    TURN_END,
    TURN_START,
    to_json,
)
from legorl.tasks.mutate import FAMILIES

SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)

BASH_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
"""The tool of mini-swe-agent 2.4.6, whose rendering is one token."""

BOILERPLATE = (
    CALL_START,
    CALL_END,
    "You are a helpful assistant that can interact with a computer.",
    "\n\n" + TOOLS_HEAD,
    TOOLS_HEAD,
    "\n" + to_json(BASH_TOOL),
    TOOLS_TAIL,
    "system\n",
    "user\n",
    "assistant\n",
    "<tool_response>\n",
    "\n</tool_response>",
    "Please solve this issue: ",
    "The tests of `",
    "` fail.\n",
    "Location: ",
    " line ",
    '\n{"name": "bash", "arguments": {"command": "',
    '"}}\n',
    EDIT_START,
    PATTERN,
    EDIT_END,
    AND_TEST,
    TEST,
    SUBMIT,
    "(no output)",
    "error: no tool call",
)


def corpus(instructions: Iterable[str]) -> Iterator[str]:
    """What a policy will read and write on tasks with these instructions: text, commands, test output."""
    for instruction in instructions:
        yield instruction
        for line in instruction.split("\n"):
            if line.startswith("assert "):
                yield f"E {line}\n2 failed, 2 passed"
            elif line.startswith("Location: "):
                yield line.split(" ")[1]
        yield "1 failed, 3 passed\n3 failed, 1 passed\n4 failed, 0 passed\n4 passed"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn merges from `texts` (numbers below 100 and the operators are always learned).

    The result has at most `vocabulary` + `len(BOILERPLATE)` entries, fewer when the texts hold too little.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = [piece for text in texts for piece in _without_boilerplate(text)]
    numbers = [str(number) for number in range(100)] * 3
    operators = [operator for family in FAMILIES.values() for operator in family] * 10
    tokenizer.train_from_iterator([*pieces, *numbers, *operators], trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in BOILERPLATE])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, max_positions: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into the directory `out`."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _without_boilerplate(text: str) -> list[str]:
    for fixed in sorted((*SPECIAL, *BOILERPLATE), key=len, reverse=True):
        text = text.replace(fixed, "\0")
    return [piece for piece in text.split("\0") if piece]

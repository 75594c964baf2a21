"""Incremental rendering equals the whole, and the start-up check refuses what cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.engine.base import Parsed
from legorl.errors import UserError
from legorl.proxy.check import check_template
from legorl.proxy.messages import Message, Role, ToolUse
from legorl.proxy.render import Prior, Renderer
from tests.proxy.models import CHATML, HermesLike, write_model
from tests.proxy.talk import BASH, assistant, result, system, user

CALL = ToolUse("call_1", "bash", '{"command": "echo <&> caf\u00e9"}')
CONVERSATION = [
    system("You help."),
    user("Fix it."),
    assistant("Look.", CALL, ToolUse("call_2", "bash", "not json")),
    result(CALL, "a.py\n"),
    Message(Role.TOOL, "", call_id="call_2"),
    assistant("Done."),
    user("Thanks."),
]


def test_what_follows_is_rendered_as_in_the_whole(renderer: Renderer) -> None:
    whole = renderer.opening(CONVERSATION, (BASH,)).tolist()
    start = renderer.opening(CONVERSATION[:3], (BASH,)).tolist()
    follow = renderer.following(Prior(Role.ASSISTANT), CONVERSATION[3:], has_tools=True)
    assert follow is not None
    assert start + follow.tolist() == whole
    assert renderer.following(Prior(Role.TOOL), CONVERSATION[4:], has_tools=True) is None


def test_special_tokens_are_kept_out_of_replies(renderer: Renderer) -> None:
    ids = renderer.encode("<|im_start|>Hi <tool_call> there<|im_end|><|endoftext|>")
    assert renderer.decode(ids) == "Hi <tool_call> there"


def test_the_check_finds_the_template_good(renderer: Renderer) -> None:
    report = check_template(renderer, HermesLike())
    assert report.prefix_preserving
    assert report.end_token == "<|im_end|>"
    assert report.end_tail == "<|im_end|>\n"
    assert report.generation_prompt == "<|im_start|>assistant\n"


def test_a_template_that_drops_old_reasoning_works_and_is_reported(tmp_path: Path) -> None:
    thinking = CHATML.replace(
        "'<|im_start|>assistant\\n' + message.content",
        "'<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if loop.last else '') + message.content",
    )
    assert thinking != CHATML
    report = check_template(Renderer.load(write_model(tmp_path, thinking)), HermesLike())
    assert not report.prefix_preserving


BAD = {
    "no end token": (
        CHATML.replace("{{- '<|im_end|>\\n' }}\n    {%- elif", "{{- '\\n' }}\n    {%- elif"),
        "special",
    ),
    "refuses tools": (CHATML.replace("message.role == 'tool'", "message.role == 'never'"), "tool"),
    "raises": ("{{ raise_exception('no chat here') }}", "no chat here"),
    "does not compile": ("{% if %}", "cannot be used"),
    "no generation prompt": (CHATML.replace("if add_generation_prompt", "if false"), "add_generation_prompt"),
    "wraps the text": (
        CHATML.replace("+ message.content }}\n        {%- for", "}}\n        {%- for"),
        "assistant",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_template_that_cannot_work_is_a_clear_error(tmp_path: Path, name: str) -> None:
    template, expected = BAD[name]
    assert template != CHATML
    with pytest.raises(UserError, match=expected):
        check_template(Renderer.load(write_model(tmp_path, template)), HermesLike())


class Deaf:
    """A parser of another model family."""

    def parse(self, text: str) -> Parsed:
        return Parsed(text)


def test_a_parser_of_another_family_is_a_clear_error(renderer: Renderer) -> None:
    with pytest.raises(UserError, match=r"model\.tool_parser"):
        check_template(renderer, Deaf())


def test_missing_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Renderer.load(tmp_path)
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        Renderer.load(tmp_path)

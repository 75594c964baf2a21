"""vLLM's own tool parsers behind `ReplyParser`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from legorl.config.schema import ModelConfig
from legorl.errors import UserError
from legorl.proxy.check import check_template
from legorl.proxy.render import Renderer
from tests.proxy.models import HermesLike, call_text, write_model

pytestmark = pytest.mark.integration
pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_hermes(model_dir: Path) -> None:
    from legorl.engine.vllm_parser import vllm_parser

    parser = vllm_parser(ModelConfig(tool_parser="hermes"), model_dir)
    report = check_template(Renderer.load(model_dir), parser)
    assert report.prefix_preserving
    replies = [
        "Just text.",
        "",
        call_text("bash", '{"command": "ls"}', "Look."),
        call_text("bash", '{ "command" :  "caf\\u00e9" }'),
        call_text("bash", '{"a": 1}') + call_text("bash", '{"b": 2}'),
        call_text("bash", '{"a": }', "broken"),
        "<tool_call>\n{",
    ]
    for reply in replies:  # the stand-in of the unit tests reads them alike
        assert parser.parse(reply) == HermesLike().parse(reply)
    assert parser.parse(replies[2]).calls[0].arguments == '{"command": "ls"}'
    assert parser.parse(replies[5]).text == replies[5]


def test_an_unknown_name_lists_the_known_ones(model_dir: Path) -> None:
    from legorl.engine.vllm_parser import vllm_parser

    with pytest.raises(UserError, match=r"hermes.*qwen3_coder"):
        vllm_parser(ModelConfig(tool_parser="hermies"), model_dir)


def test_reasoning_and_calls_are_taken_apart(tmp_path: Path) -> None:
    from legorl.engine.vllm_parser import vllm_parser

    model = write_model(tmp_path)
    named = ModelConfig(tool_parser="hermes", reasoning_parser="deepseek_r1")
    with pytest.raises(UserError, match=r"model\.reasoning_parser=deepseek_r1 cannot work"):
        vllm_parser(named, model)  # no such tokens
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(
        [AddedToken(mark, normalized=False, special=False) for mark in ("<think>", "</think>")]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    call = call_text("bash", '{"command": "ls"}')
    parsed = vllm_parser(named, model).parse(f"<think>Where am I?</think>Look.\n{call}")
    assert parsed.reasoning == "Where am I?"
    assert parsed.text.strip() == "Look."
    assert [(call.name, call.arguments) for call in parsed.calls] == [("bash", '{"command": "ls"}')]
    assert vllm_parser(named, model).parse("<think>Hm.</think>Done.").text == "Done."


def test_what_a_parser_chokes_on_stays_text(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.tool_parsers import ToolParserManager

    from legorl.engine.vllm_parser import vllm_parser

    parser = vllm_parser(ModelConfig(tool_parser="hermes"), model_dir)

    def choke(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(ToolParserManager.get_tool_parser("hermes"), "extract_tool_calls", choke)
    assert parser.parse("anything").text == "anything"

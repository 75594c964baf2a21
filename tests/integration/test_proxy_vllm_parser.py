"""vLLM's own tool parsers behind `ReplyParser`."""

from __future__ import annotations

from pathlib import Path

import pytest

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

    parser = vllm_parser("hermes", model_dir)
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
        vllm_parser("hermies", model_dir)

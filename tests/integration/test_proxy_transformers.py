"""Rendering equals Hugging Face's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.proxy.render import Renderer
from legorl.proxy.template import message_for_template, tools_for_template
from tests.proxy.models import write_model
from tests.proxy.talk import BASH
from tests.proxy.test_render import CONVERSATION

pytestmark = pytest.mark.integration
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("length", range(2, len(CONVERSATION) + 1))
@pytest.mark.parametrize("tools", [(), (BASH,)])
def test_text_and_ids_are_those_of_transformers(model_dir: Path, length: int, tools: tuple) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    ours = Renderer.load(model_dir)
    messages = CONVERSATION[:length]
    ids = theirs.apply_chat_template(
        [message_for_template(m) for m in messages],
        tools=tools_for_template(tools),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert ours.render_full(messages, tools).tolist() == list(ids)

"""A tokenizer that knows the tasks, and everything around a trial but the sandbox and the harness."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.config.compose import compose
from legorl.config.schema import Config
from legorl.policy.template import CHAT_TEMPLATE
from legorl.policy.tokenizer import corpus, save_tokenizer, train_tokenizer
from tests.trial.tasks_for_tests import make_task


def make_model(directory: Path) -> Path:
    """A Hugging Face directory without weights."""
    task = make_task(directory / "task")
    out = directory / "model"
    out.mkdir()
    save_tokenizer(train_tokenizer([*corpus([task.instruction]), CHAT_TEMPLATE], 500), out, 4096)
    return out


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `make_model`."""
    return make_model(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def laptop() -> Config:
    """The default configuration, to be copied before it is changed."""
    return compose()

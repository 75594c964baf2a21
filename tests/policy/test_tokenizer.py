"""The tokenizer: any text survives, decisions are one token, held-out names hold nothing new."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from legorl.policy import commands
from legorl.policy.expert import Expert, Mode
from legorl.policy.template import TURN_END, TURN_START
from legorl.policy.tokenizer import BOILERPLATE, corpus, save_tokenizer, train_tokenizer
from legorl.tasks import repair
from legorl.tasks.mutate import FAMILIES
from tests.policy.simulator import draft, run_episode


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(corpus(draft(number).instruction for number in range(240)), 768)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@given(st.text(max_size=40))
@settings(deadline=None)
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


def test_the_ids_are_dense_and_the_special_ones_come_first(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(tokenizer.get_vocab_size()))
    assert [tokenizer.token_to_id(name) for name in ("<|endoftext|>", TURN_START, TURN_END)] == [0, 1, 2]
    assert len(vocabulary) <= 768 + len(BOILERPLATE)


def test_only_turn_markers_are_special(tokenizer: Tokenizer) -> None:
    text = f"{TURN_START}assistant\n<tool_call>\nx\n</tool_call>{TURN_END}"
    assert (
        tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True)
        == "assistant\n<tool_call>\nx\n</tool_call>"
    )


@pytest.mark.parametrize("family", FAMILIES.values())
def test_each_decision_is_one_token(tokenizer: Tokenizer, family: tuple[str, ...]) -> None:
    """Commands differ first in one token, and each operator and number is one."""
    opener = '\n{"name": "bash", "arguments": {"command": "'
    first = {
        ids(tokenizer, opener + command)[1]
        for command in (commands.Edit("a/b.py", 2, family[0], True).command(), commands.TEST, commands.SUBMIT)
    }
    assert len(first) == 3
    lengths = {
        (operator, line): len(ids(tokenizer, commands.Edit("shop/cart.py", line, operator, True).command()))
        for operator in family
        for line in (2, 5, 8, 11)
    }
    assert len(set(lengths.values())) == 1
    tested = ids(tokenizer, commands.Edit("shop/cart.py", 2, "<", True).command() + '"}}\n')
    blind = ids(tokenizer, commands.Edit("shop/cart.py", 2, "<", False).command() + '"}}\n')
    assert len(tested) == len(blind) + 1 and tested[:-2] == blind[:-1]


def test_a_conversation_is_short(tokenizer: Tokenizer) -> None:
    episode = run_episode(draft(0), Expert(Mode.PERFECT), random.Random(0))
    pieces = [(len(ids(tokenizer, piece)), by_policy) for piece, by_policy in episode.written]
    assert pieces[0][0] < 90
    assert all(count < 20 for count, by_policy in pieces if by_policy)
    assert len(ids(tokenizer, episode.text)) == sum(count for count, _ in pieces)


def test_heldout_names_are_made_of_known_words(tokenizer: Tokenizer) -> None:
    """Every word the generator can put into a held-out task is one token, learned from train tasks."""
    for word in (*repair.NOUNS, *repair.LIMITS):
        assert len(ids(tokenizer, f" {word}")) == 1, word
    for word in (*repair.PACKAGES, *repair.MODULES):
        assert len(ids(tokenizer, f"/{word}")) == 2, word


def test_the_directory_holds_the_template_twice(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from legorl.proxy.render import Renderer

    save_tokenizer(tokenizer, tmp_path, 4096)
    renderer = Renderer.load(tmp_path)
    assert renderer.end_id == tokenizer.token_to_id(TURN_END)
    (tmp_path / "chat_template.jinja").unlink()
    assert (
        Renderer.load(tmp_path).generation_prompt == renderer.generation_prompt == "<|im_start|>assistant\n"
    )

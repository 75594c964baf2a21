"""Templates of several model families: checked at the start, and then a whole trial with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from legorl.proxy.check import check_template
from legorl.proxy.messages import Message, Role, ToolUse
from legorl.proxy.refusal import Refusal
from legorl.proxy.render import Renderer
from tests.proxy.families import FAMILIES, Family, write_family
from tests.proxy.talk import BASH, Talk, assistant, result, system, user

START = [system("You help."), user("Fix it.")]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def talk(family: Family, tmp_path: Path) -> Talk:
    return Talk(Renderer.load(write_family(tmp_path, family)), end=family.end, parser=family.parser)


def test_the_check_finds_out_what_it_is(talk: Talk, family: Family) -> None:
    report = check_template(talk.renderer, family.parser)
    assert report.prefix_preserving == family.preserving
    assert report.end_token == family.end
    assert report.end_tail.startswith(family.end)


def test_a_trial_extends_and_keeps_every_turn_as_it_was_sampled(talk: Talk, family: Family) -> None:
    history = list(START)
    for number in range(3):
        turn = talk.ask(history, family.call)
        (call,) = turn.message.calls
        shown = Message(
            Role.ASSISTANT, turn.message.text, calls=(ToolUse(call.id, "bash", '{"command":"ls"}'),)
        )
        history += [shown, result(call, f"output {number}")]
    said = talk.ask(history, "All done.")
    last = talk.ask([*history, said.message, user("Thanks.")])
    assert talk.kinds() == ["open", "extend", "extend", "extend", "extend"]
    text = talk.prompt_text(last)
    assert text.count(family.call + family.end) == 3
    places = [
        text.index(part) for part in ("You help.", "Fix it.", "output 0", "output 1", "output 2", "Thanks.")
    ]
    assert places == sorted(places)
    assert text.endswith(talk.renderer.generation_prompt)
    assert len(re.findall("All done.", text)) == 1
    talk.audit()
    assert len(talk.ledger.rows()) == 1


def test_what_is_not_sampled_is_rendered_as_in_the_whole(talk: Talk, family: Family) -> None:
    """A foreign history, opened at once, and continued piece by piece by what the harness adds."""
    call = ToolUse("call00001", "bash", '{"command": "ls"}')
    history = [*START, assistant("", call), result(call, "a.py")]
    first = talk.ask(history, "One.")
    assert talk.prompts[first.id] == talk.renderer.render_full(history, (BASH,)).tolist()
    talk.ask([*history, first.message, user("More.")], "Two.")
    fork = talk.ask([*history[:2], assistant("", call), result(call, "b.py")], "Three.")
    assert (
        talk.prompts[fork.id]
        == talk.renderer.render_full([*history[:3], result(call, "b.py")], (BASH,)).tolist()
    )
    talk.audit()


@pytest.mark.parametrize("family", [FAMILIES["strict"]], ids=["strict"])
def test_what_a_template_refuses_is_refused_and_leaves_nothing(talk: Talk, family: Family) -> None:
    first = talk.ask(START, "One.")
    for wrong in (
        [*START, user("Again.")],
        [*START, first.message, user("a"), user("b")],
        [user("u"), *START],
    ):
        with pytest.raises(Refusal, match=r"(alternate|comes first)"):
            talk.ask(wrong)
    talk.ask([*START, first.message, user("Go on.")])
    assert talk.kinds() == ["open", "extend"]
    talk.audit()


@pytest.mark.parametrize("family", [FAMILIES["llama"]], ids=["llama"])
def test_texts_that_a_template_trims_are_new_text_in_the_context(talk: Talk, family: Family) -> None:
    first = talk.ask(START, "  spaced  ")
    second = talk.ask([*START, assistant("spaced"), user("  Go on.\n")])
    assert talk.kinds() == ["open", "extend"]
    assert (
        "  spaced  <|eot_id|><|start_header_id|>user<|end_header_id|>\n\nGo on.<|eot_id|>"
        in talk.prompt_text(second)
    )
    assert not first.changed
    talk.audit()

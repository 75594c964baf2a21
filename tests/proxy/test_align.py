"""Every way in which harnesses are known to change their own history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legorl.engine.base import Sampling
from legorl.engine.scripted import ScriptedEngine
from legorl.harness.base import Speaker, ThreadKind
from legorl.harness.speakers import RULES
from legorl.proxy.messages import Message, ToolUse, order_results
from legorl.proxy.proxy import Proxy
from legorl.proxy.render import Renderer
from tests.proxy.models import HermesLike, call_text
from tests.proxy.talk import BASH, Talk, assistant, result, system, user

START = [system("You help."), user("Fix it.")]
LOOK = call_text("bash", '{"command": "ls"}', "Let me look.")
TWO = LOOK + "\n" + call_text("bash", '{"command": "pwd"}')


@pytest.fixture
def talk(renderer: Renderer) -> Talk:
    return Talk(renderer)


def test_an_appended_history_extends_and_equals_a_full_rendering(talk: Talk) -> None:
    first = talk.ask(START, LOOK)
    history = [*START, first.message, result(first.message.calls[0], "a.py")]
    second = talk.ask(history, "Done.")
    third = talk.ask([*history, second.message, user("And now?")])
    assert talk.kinds() == ["open", "extend", "extend"]
    canonical = replace(first.message, text="Let me look.")  # the parser keeps the line break before a call
    full = talk.renderer.render_full(
        [*START, canonical, *history[3:], second.message, user("And now?")], (BASH,)
    )
    assert talk.prompts[third.id] == full.tolist()
    assert len(talk.ledger.rows()) == 1
    talk.audit()


ECHOES = {
    "spacing": lambda c: assistant("Let me look.", ToolUse(c.id, c.name, '{"command":"ls"}')),
    "escapes and defaults": lambda c: assistant(
        "Let me look.", ToolUse(c.id, c.name, '{"all": false, "command": "\\u006cs"}')
    ),
    "renamed to invalid": lambda c: assistant("Let me look.", ToolUse(c.id, "invalid", '{"tool": "bash"}')),
    "arguments lost": lambda c: assistant("Let me look.", ToolUse(c.id, c.name, '{"_malformed": true}')),
    "text dropped": lambda c: assistant("", c),
    "text trimmed": lambda c: assistant("  Let me look.  \n", c),
    "merged with other text": lambda c: assistant("Got it.\nLet me look.", c),
}


@pytest.mark.parametrize("name", ECHOES)
def test_call_ids_decide_whatever_became_of_the_rest(talk: Talk, name: str) -> None:
    first = talk.ask(START, LOOK)
    call = first.message.calls[0]
    second = talk.ask([*START, ECHOES[name](call), result(call, "a.py")])
    assert talk.kinds() == ["open", "extend"]
    assert LOOK in talk.prompt_text(second)
    assert first.echoed
    assert ("name" in first.changed) == (name == "renamed to invalid")
    talk.audit()


def test_a_turn_whose_second_call_was_dropped_still_matches(talk: Talk) -> None:
    first = talk.ask(START, TWO)
    call = first.message.calls[0]
    talk.ask([*START, assistant("Let me look.", call), result(call, "a.py")])
    assert talk.kinds() == ["open", "extend"]
    talk.audit()


def test_a_text_turn_matches_by_trimmed_text_in_its_position(talk: Talk) -> None:
    talk.ask(START, "I am done.\n")
    talk.ask([*START, assistant("I am done."), user("Go on.")], "Yes.")
    talk.ask([*START, assistant("I was done."), user("Go on.")], "No.")
    assert talk.kinds() == ["open", "extend", "fork"]
    talk.audit()


def test_a_vanished_turn_with_a_reminder_on_an_older_message_forks(talk: Talk) -> None:
    talk.ask(START, "")
    second = talk.ask([START[0], user("Fix it.\n[no visible output]")])
    assert talk.kinds() == ["open", "open"]  # nothing before the changed message has a boundary
    assert "no visible output" in talk.prompt_text(second)
    assert len(talk.ledger.rows()) == 2
    talk.audit()


def test_a_dropped_turn_forks_and_both_are_trained(talk: Talk) -> None:
    first = talk.ask(START, "no call")
    second = talk.ask([*START, user("error: no tool call")], LOOK)
    assert talk.kinds() == ["open", "fork"]
    assert talk.ledger.segments[1].forked_from == (
        0,
        len(talk.prompts[first.id]) - len(talk.renderer.generation_ids),
    )
    assert (
        talk.prompts[second.id]
        == talk.renderer.render_full([*START, user("error: no tool call")], (BASH,)).tolist()
    )
    assert len(talk.ledger.rows()) == 2
    talk.audit()


def test_parallel_results_count_in_the_order_of_their_calls() -> None:
    one, two = ToolUse("1", "bash", "{}"), ToolUse("2", "bash", "{}")
    messages = [assistant("", one, two), result(two, "b"), result(one, "a"), user("x")]
    assert [m.text for m in order_results(messages)] == ["", "a", "b", "x"]


def test_a_fork_inside_a_run_of_tool_results_starts_at_the_call(talk: Talk) -> None:
    first = talk.ask(START, TWO)
    one, two = first.message.calls
    talk.ask([*START, first.message, result(one, "a"), result(two, "b")], "Done.")
    third = talk.ask([*START, first.message, result(one, "a"), result(two, "changed")])
    assert talk.kinds() == ["open", "extend", "fork"]
    assert talk.prompt_text(third).count("<tool_response>") == 2
    talk.audit()


def test_a_trailing_message_that_the_policy_did_not_write(talk: Talk) -> None:
    first = talk.ask(START, LOOK)
    history = [*START, first.message, result(first.message.calls[0], "a.py")]
    second = talk.ask([*history, assistant("MAXIMUM STEPS REACHED")], LOOK)
    third = talk.ask([*history, second.message, result(second.message.calls[0], "b.py")])
    assert talk.kinds() == ["open", "extend", "fork"]
    assert "MAXIMUM" in talk.prompt_text(second)
    assert "MAXIMUM" not in talk.prompt_text(third)
    assert talk.prompt_text(third).count(LOOK) == 2
    talk.audit()


def test_other_tools_begin_a_new_conversation(talk: Talk) -> None:
    first = talk.ask(START, LOOK)
    history = [*START, first.message, result(first.message.calls[0], "a.py")]
    second = talk.ask(history, tools=(BASH, replace(BASH, name="read")))
    assert talk.kinds() == ["open", "open"]
    assert LOOK in talk.prompt_text(second)
    talk.audit()


def test_a_synthetic_message_that_is_later_merged_with_the_turn_behind_it(talk: Talk) -> None:
    summary = [START[0], user("Summary."), assistant("Got it. Thanks!")]
    first = talk.ask(summary, LOOK)
    call = first.message.calls[0]
    merged = [*summary[:2], assistant("Got it. Thanks!Let me look.", call), result(call, "a.py")]
    second = talk.ask(merged, "Done.")
    talk.ask(
        [*summary[:2], assistant("Got it. Thanks!\n" + LOOK, call), result(call, "a.py"), second.message]
    )
    assert talk.kinds() == ["open", "extend", "extend"]
    assert "Thanks!<|im_end|>" in talk.prompt_text(second)
    talk.audit()


def test_a_synthetic_message_merged_with_a_turn_of_text(talk: Talk) -> None:
    talk.ask([*START, assistant("Got it.")], "I am done.\n")
    talk.ask([*START, assistant("Got it.\nI am done."), user("Go on.")])
    assert talk.kinds() == ["open", "extend"]
    talk.audit()


def test_very_many_neighbours_of_one_role(talk: Talk) -> None:
    notes = [user(f"note {number}") for number in range(2000)]
    first = talk.ask([START[0], *notes], "Noted.")
    talk.ask([START[0], user("\n".join(note.text for note in notes)), first.message, user("Go on.")])
    assert talk.kinds() == ["open", "extend"]
    talk.audit()


def test_neighbours_of_one_role_are_the_same_together_and_apart(talk: Talk) -> None:
    apart = [system("You"), system("help."), user("Fix"), user(""), user("it.")]
    together = [system("You\nhelp."), user("Fix\n\nit.")]
    first = talk.ask(apart, LOOK)
    history = [first.message, result(first.message.calls[0], "a.py")]
    second = talk.ask([*together, *history], "Done.")
    talk.ask([*apart[:2], together[1], *history, second.message, user("And"), user("now?")], "Yes.")
    talk.ask([*together, *history, second.message, user("And\nnow?"), assistant("Yes.")])
    talk.ask([*together, *history, second.message, user("And\nthen?")])
    assert talk.kinds() == ["open", "extend", "extend", "extend", "fork"]
    talk.audit()


TEXT_ECHOES = {
    "other spaces": ("Look. <run>ls</run> \n", "Look.\n\n<run>ls</run>", "extend"),
    "the first of two calls": ("<run>ls</run>\n<run>pwd</run>", "<run>ls</run>", "extend"),
    "what followed it dropped": ("<run>ls</run> and so on", "<run>ls</run>", "extend"),
    "another text": ("<run>ls</run>", "<run>rm</run>", "fork"),
    "nothing": ("<run>ls</run>", "", "fork"),
}


@pytest.mark.parametrize("name", TEXT_ECHOES)
def test_turns_of_harnesses_that_call_tools_in_text(talk: Talk, name: str) -> None:
    said, shown, kind = TEXT_ECHOES[name]
    first = talk.ask(START, said)
    second = talk.ask([*START, assistant(shown), user("a.py")])
    assert talk.kinds() == ["open", kind]
    assert (said + "<|im_end|>" in talk.prompt_text(second)) == (kind == "extend")
    assert bool(first.changed) == (kind == "extend")
    talk.audit()


OBSERVED = {
    "as it was": ("Let me look.", "bash", '{"command": "ls"}', "extend"),
    "spelled otherwise": (" Let me look.", "bash", '{"command":"ls"}', "extend"),
    "renamed": ("Let me look.", "invalid", '{"command": "ls"}', "fork"),
    "other arguments": ("Let me look.", "bash", '{"command": "ls", "x": 1}', "fork"),
    "other text": ("", "bash", '{"command": "ls"}', "fork"),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_observed_echoes_fork_where_the_harness_changed_a_turn(renderer: Renderer, name: str) -> None:
    talk = Talk(renderer, observed=True)
    text, tool, arguments, kind = OBSERVED[name]
    first = talk.ask(START, LOOK)
    call = first.message.calls[0]
    history = [*START, assistant(text, ToolUse(call.id, tool, arguments)), result(call, "a.py")]
    second = talk.ask(history, "Done.")
    talk.ask([*history, second.message, user("Go on.")])
    assert talk.kinds() == ["open", kind, "extend"]
    if kind == "fork":
        assert talk.prompts[second.id] == renderer.render_full(history, (BASH,)).tolist()
    talk.audit()
    assert not talk.ledger.orphans


def test_an_observed_echo_proves_use_also_where_it_was_changed(renderer: Renderer) -> None:
    talk = Talk(renderer, observed=True)
    first = talk.ask(START, LOOK)
    talk.ask(START, "too late")
    call = first.message.calls[0]
    talk.ask([*START, assistant("", ToolUse(call.id, "invalid", "{}")), result(call, "a.py")])
    talk.audit()
    assert not talk.ledger.orphans


def test_the_proxy_hands_the_setting_on(renderer: Renderer) -> None:
    engine = ScriptedEngine(lambda prompt, rng: "", renderer.tokenizer)
    proxy = Proxy(engine, renderer, HermesLike(), context_tokens=99, observed=True)
    session = proxy.open(
        "t", speaker=RULES["mini_swe_agent"], sampling=Sampling(), turn_limit=1, trial_tokens=1
    )
    talk = Talk(renderer)
    talk.ledger = session.ledger
    first = talk.ask(START, LOOK)
    talk.ask([*START, assistant("", first.message.calls[0]), result(first.message.calls[0], "a.py")])
    assert talk.kinds() == ["open", "fork"]


def test_compaction_keeps_the_last_turns_as_they_were_sampled(talk: Talk) -> None:
    odd = call_text("bash", '{ "command" :   "ls" }', "Odd  spacing.")
    first = talk.ask(START, LOOK)
    history = [*START, first.message, result(first.message.calls[0], "a.py")]
    second = talk.ask(history, odd)
    kept = [second.message, result(second.message.calls[0], "b.py")]
    third = talk.ask([START[0], user("This session is being continued."), *kept])
    assert talk.kinds() == ["open", "extend", "open"]
    assert odd in talk.prompt_text(third)
    assert LOOK not in talk.prompt_text(third)
    assert [len(row.calls) for row in talk.ledger.rows()] == [2, 1]
    talk.audit()


def test_the_same_request_again_replaces_the_last_answer(talk: Talk) -> None:
    first = talk.ask(START, "one")
    second = talk.ask(START, LOOK)
    talk.ask([*START, second.message, result(second.message.calls[0], "a.py")])
    assert talk.kinds() == ["open", "retry", "extend"]
    talk.audit()
    assert first.orphan == "replaced"
    assert len(talk.ledger.rows()) == 1


def test_two_answers_to_one_request_are_both_trained_when_both_are_used(talk: Talk) -> None:
    """Two subagents of one prompt, say, of a harness that tells them apart by nothing."""
    one, two = talk.ask(START, LOOK), talk.ask(START, TWO)
    talk.ask([*START, two.message, *(result(call, "two") for call in two.message.calls)])
    third = talk.ask([*START, one.message, result(one.message.calls[0], "one")])
    assert talk.kinds() == ["open", "retry", "extend", "extend"]
    assert talk.prompt_text(third).endswith("one\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    talk.audit()
    assert not talk.ledger.orphans
    assert [len(row.calls) for row in talk.ledger.rows()] == [2, 2]


def test_an_answer_asked_for_again_in_vain_stays(talk: Talk) -> None:
    first = talk.ask(START, LOOK)
    talk.drop(START)
    talk.ask([*START, first.message, result(first.message.calls[0], "a.py")])
    assert talk.kinds() == ["open", "extend"]
    talk.audit()
    assert not talk.ledger.orphans


def test_a_request_sent_three_times_keeps_one_answer(talk: Talk) -> None:
    lost = [talk.ask(START, "lost", delivered=False), talk.ask(START, "thrown away")]
    talk.drop(START)
    kept = talk.ask(START, LOOK)
    talk.ask([*START, kept.message, result(kept.message.calls[0], "a.py")])
    assert talk.kinds() == ["open", "retry", "retry", "extend"]
    talk.audit()
    assert [turn.orphan for turn in lost] == ["never delivered", "replaced"]
    assert [len(row.calls) for row in talk.ledger.rows()] == [2]


def test_an_answer_that_was_followed_is_no_orphan_when_the_harness_goes_back(talk: Talk) -> None:
    first = talk.ask(START, "one")
    talk.ask([*START, first.message, user("Go on.")], "two")
    talk.ask(START, "three")
    assert talk.kinds() == ["open", "extend", "fork"]
    assert not talk.ledger.orphans
    talk.audit()


def test_an_answer_that_never_arrived_is_an_orphan(talk: Talk) -> None:
    lost = talk.ask(START, "lost", delivered=False)
    talk.audit()
    assert lost.orphan == "never delivered"
    assert talk.ledger.rows() == []


def test_a_partial_reply_after_a_cut_stream(talk: Talk) -> None:
    first = talk.ask(START, LOOK)
    history = [*START, first.message, result(first.message.calls[0], "a.py")]
    lost = talk.ask(history, "I will now fix it.", delivered=False)
    second = talk.ask([*history, assistant("I will")], "Done.")
    assert talk.kinds() == ["open", "extend", "extend"]
    assert talk.prompt_text(second).endswith("assistant\nI will<|im_end|>\n<|im_start|>assistant\n")
    talk.audit()
    assert lost.orphan == "never delivered"
    assert [len(row.calls) for row in talk.ledger.rows()] == [2]


def test_a_lost_answer_that_arrived_after_all_is_trained(talk: Talk) -> None:
    late = talk.ask(START, LOOK, delivered=False)
    talk.ask([*START, user("Still there?")], "Yes.")
    talk.ask([*START, late.message, result(late.message.calls[0], "a.py")])
    assert talk.kinds() == ["open", "extend", "extend"]
    talk.audit()
    assert not talk.ledger.orphans
    assert [len(row.calls) for row in talk.ledger.rows()] == [1, 2]


def test_an_echo_proves_delivery(talk: Talk) -> None:
    first = talk.ask(START, LOOK, delivered=False)
    talk.ask([*START, first.message, result(first.message.calls[0], "a.py")])
    talk.audit()
    assert not first.orphan


def test_a_reply_cut_at_the_length_limit_is_completed_as_context(talk: Talk) -> None:
    first = talk.ask(START, "I was going to say", cut=True)
    second = talk.ask([*START, first.message, user("Go on.")])
    assert talk.kinds() == ["open", "extend"]
    assert "I was going to say<|im_end|>\n<|im_start|>user" in talk.prompt_text(second)
    talk.audit()


def test_a_history_that_ends_with_the_policys_own_turn(talk: Talk) -> None:
    first = talk.ask(START, "one")
    second = talk.ask([*START, first.message], "two")
    assert talk.kinds() == ["open", "extend"]
    assert talk.prompt_text(second).endswith("one<|im_end|>\n<|im_start|>assistant\n")
    talk.audit()


def test_threads_stay_apart_and_only_those_asked_for_train(talk: Talk) -> None:
    side = Speaker(ThreadKind.SIDE, key="title")
    talk.ask(START, "A title", speaker=side)
    talk.ask(START, "Done.")
    assert talk.kinds() == ["open", "open"]
    assert [row.thread for row in talk.ledger.rows()] == ["main"]
    assert [row.thread for row in talk.ledger.rows(("side",))] == ["side:title"]
    talk.audit()


def test_a_different_request_meanwhile_forks_from_what_is_settled(talk: Talk) -> None:
    from legorl.proxy.messages import ChatRequest

    first = talk.ask(START, LOOK)
    call = first.message.calls[0]
    flying = talk.ledger.begin(
        ChatRequest((*START, first.message, result(call, "a.py")), (BASH,)), Speaker(ThreadKind.MAIN)
    )
    other = talk.ask([*START, first.message, result(call, "b.py")], "Other.")
    assert other.kind == "fork"
    talk.ledger.rollback(flying)
    talk.audit()


def test_a_request_that_was_dropped_leaves_nothing(talk: Talk) -> None:
    first = talk.ask(START, LOOK)
    history = [*START, first.message, result(first.message.calls[0], "a.py")]
    talk.drop(history)
    talk.drop([user("Something else.")])
    talk.ask(history)
    assert talk.kinds() == ["open", "extend"]
    assert len(talk.ledger.segments) == 1
    talk.audit()


def test_foreign_assistant_messages_are_context(talk: Talk) -> None:
    foreign = Message(START[0].role.ASSISTANT, "", calls=(ToolUse("x1", "bash", '{"command": "ls"}'),))
    history = [*START, foreign, result(foreign.calls[0], "a.py")]
    talk.ask(history)
    assert talk.prompts["c0"] == talk.renderer.render_full(history, (BASH,)).tolist()
    talk.audit()

"""Random rewrites, retries and disconnects keep I1 to I4 and leave nothing running."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legorl.engine.base import Sampling
from legorl.engine.scripted import ScriptedEngine
from legorl.errors import ProxyError
from legorl.harness.base import Speaker, ThreadKind
from legorl.proxy import invariants
from legorl.proxy.echoes import Turn
from legorl.proxy.ledger import thread_name
from legorl.proxy.messages import ChatRequest, Message, Role, ToolUse
from legorl.proxy.proxy import Proxy
from legorl.proxy.render import Renderer
from legorl.proxy.store import load, save
from tests.proxy.models import HermesLike, call_text
from tests.proxy.talk import BASH, Talk, result, system, user

MOVES = [
    "step",
    "step",
    "step",
    "reserialise",
    "rename",
    "drop_turn",
    "remind",
    "again",
    "lost",
    "leave",
    "compact",
    "rewind",
    "tools",
    "side",
    "trailing",
    "reverse_results",
    "merge",
    "regroup",
    "first_answer",
    "squeeze",
    "synthetic",
]
SPEAKERS = [
    Speaker(ThreadKind.MAIN),
    Speaker(ThreadKind.SUBAGENT, key="a", parent="main"),
    Speaker(ThreadKind.SUBAGENT, key="b", parent="main"),
]
REPLIES = [
    "Done.",
    "",
    "  spaced \n",
    call_text("bash", '{"command": "ls"}', "Look."),
    call_text("bash", '{ "command" :  "caf\\u00e9" }'),
    call_text("bash", '{"command": "a"}') + "\n" + call_text("bash", '{"command": "b"}'),
    call_text("bash", '{"command": }'),
    "<tool_call>\n{",
]
LATE = call_text("bash", '{"command": "late"}')


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 0, 1, 2]), st.sampled_from(MOVES), st.sampled_from(REPLIES), st.booleans()
        ),
        min_size=1,
        max_size=16,
    ),
    observed=st.booleans(),
)
def test_any_history_keeps_the_invariants(
    renderer: Renderer, tmp_path_factory: object, moves: list[tuple[int, str, str, bool]], observed: bool
) -> None:
    talk = Talk(renderer, observed=observed)
    harnesses = [Harness(talk, speaker) for speaker in SPEAKERS]
    for index, move, reply, cut in moves:
        harnesses[index].move(move, reply, cut)
    talk.audit()
    trained = {call.id: row.thread for row in talk.ledger.rows(("main", "subagent")) for call in row.calls}
    for harness in harnesses:
        for turn in harness.used:
            assert trained[turn] == thread_name(harness.speaker), (
                "what a harness went on with is trained, there"
            )
    directory = tmp_path_factory.mktemp("ledger")  # type: ignore[attr-defined]
    save(talk.ledger, directory)
    again = load(directory)
    assert invariants.check(again) == []
    assert [row.token_ids.tolist() for row in again.rows()] == [
        row.token_ids.tolist() for row in talk.ledger.rows()
    ]


class Harness:
    """Holds a history and rewrites it as real ones do."""

    def __init__(self, talk: Talk, speaker: Speaker) -> None:
        self.talk = talk
        self.speaker = speaker
        self.used: list[str] = []
        """Turns with calls that were in a history that was sent on."""
        self.pending: str | None = None
        self.history: list[Message] = [system("You help."), user("Fix it.")]
        self.tools = (BASH,)
        self.count = 0

    def move(self, move: str, reply: str, cut: bool) -> None:
        """Rewrite the history, send what else the move sends, then ask and go on."""
        self.count += 1
        self._edit(move)
        self._send_first(move, reply, cut)
        turn = self._ask(self.history, reply, cut=cut)
        if move == "first_answer":  # the second one came too late
            self._ask(self.history, LATE, cut=cut)
        shown = turn.message
        if move == "synthetic" and turn.message.calls:
            shown = replace(shown, text=f"{self.history.pop().text}\n{shown.text}")
        self.history.append(shown)
        self.pending = turn.id if turn.message.calls else None
        results = [result(call, f"output {self.count}") for call in turn.message.calls]
        if move == "reverse_results":
            results.reverse()
        self.history += results or [user(f"Go on {self.count}.")]

    def _edit(self, move: str) -> None:
        match move:
            case "reserialise":
                self._rewrite(lambda c: replace(c, arguments=c.arguments.replace(" ", "")))
            case "rename":
                self._rewrite(lambda c: replace(c, name="invalid", arguments="{}"))
            case "remind":
                self._map_last(Role.USER, lambda m: replace(m, text=m.text + "\nreminder"))
            case "merge":
                self._map_last(Role.ASSISTANT, lambda m: replace(m, text="Got it.\n" + m.text))
            case "squeeze":
                self._map_last(Role.ASSISTANT, lambda m: replace(m, text=" ".join(m.text.split())))
            case "drop_turn":
                self._drop_last_turn()
            case "regroup":
                self.history = regrouped(self.history)
            case "compact":
                start = max(2, len(self.history) - 3)
                while start < len(self.history) and self.history[start].role is Role.TOOL:
                    start += 1
                self.history = [self.history[0], user(f"Continued {self.count}."), *self.history[start:]]
            case "rewind":
                self.history = self.history[:2]
            case "tools":
                self.tools = (BASH, replace(BASH, name=f"tool{self.count}"))
            case "synthetic":
                self.history.append(Message(Role.ASSISTANT, "Got it."))

    def _send_first(self, move: str, reply: str, cut: bool) -> None:
        match move:
            case "leave":
                self.talk.drop(self.history, self.speaker)
            case "side":
                side = Speaker(ThreadKind.SIDE, key=f"title{self.count % 2}")
                self.talk.ask([user("Title?")], "A title.", speaker=side, tools=())
            case "trailing":
                self._ask([*self.history, Message(Role.ASSISTANT, "MAXIMUM")], "x")
            case "lost":
                self._ask(self.history, reply, delivered=False, cut=cut)
            case "again":
                self._ask(self.history, reply, cut=cut)

    def _ask(self, history: list[Message], reply: str, *, cut: bool = False, delivered: bool = True) -> Turn:
        turn = self.talk.ask(
            history, reply, speaker=self.speaker, delivered=delivered, cut=cut, tools=self.tools
        )
        if self.pending and any(call.id.startswith(f"{self.pending}-") for m in history for call in m.calls):
            self.used.append(self.pending)
        self.pending = None
        return turn

    def _rewrite(self, change: object) -> None:
        self.history = [
            replace(m, calls=tuple(_apply(change, call) for call in m.calls)) for m in self.history
        ]

    def _map_last(self, role: Role, change: object) -> None:
        for index in range(len(self.history) - 1, -1, -1):
            if self.history[index].role is role:
                self.history[index] = change(self.history[index])  # type: ignore[operator]
                return

    def _drop_last_turn(self) -> None:
        for index in range(len(self.history) - 1, 1, -1):
            if self.history[index].role is Role.ASSISTANT:
                self.history = [*self.history[:index], user("error: no tool call")]
                return


def regrouped(history: list[Message]) -> list[Message]:
    """Neighbouring user messages put into one."""
    messages: list[Message] = []
    for message in history:
        if messages and message.role is messages[-1].role is Role.USER:
            messages[-1] = replace(message, text=f"{messages[-1].text}\n{message.text}")
        else:
            messages.append(message)
    return messages


def _apply(change: object, call: ToolUse) -> ToolUse:
    return change(call)  # type: ignore[operator, no-any-return]


STEPS = ["ask", "ask", "leave", "answer", "answer"]
ASKED = [
    (Message(Role.USER, "one"),),
    (Message(Role.USER, "two"),),
    (Message(Role.USER, "one"), Message(Role.ASSISTANT, "yes"), Message(Role.USER, "more")),
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "ask", "leave", "answer", "answer"]), st.integers(0, 5)),
        max_size=14,
    )
)
def test_random_retries_and_disconnects_leave_nothing_behind(
    renderer: Renderer, steps: list[tuple[str, int]]
) -> None:
    asyncio.run(retries_and_disconnects(renderer, steps))


async def retries_and_disconnects(renderer: Renderer, steps: list[tuple[str, int]]) -> None:
    """Clients ask, leave and are answered in any order; then the trial is closed over what is in flight."""
    replies: asyncio.Queue[str] = asyncio.Queue()

    async def policy(prompt: str, rng: object) -> str:
        return await replies.get()

    engine = ScriptedEngine(policy, renderer.tokenizer, routing=(2, 2, 8))
    proxy = Proxy(engine, renderer, HermesLike(), context_tokens=4096)
    session = proxy.open(
        "t",
        speaker=lambda headers, body: Speaker(ThreadKind.MAIN),
        sampling=Sampling(max_tokens=100),
        turn_limit=1000,
        trial_tokens=100_000,
    )
    clients: list[asyncio.Task[object]] = []
    for step, number in steps:
        if step == "ask":
            request = ChatRequest(ASKED[number % len(ASKED)], (BASH,))
            speaker = SPEAKERS[number % 2]
            clients.append(asyncio.create_task(session.complete(request, speaker, "call_")))
        elif step == "answer":
            replies.put_nowait(REPLIES[number])
        elif clients:
            clients[number % len(clients)].cancel()
        for _ in range(6):
            await asyncio.sleep(0)
    ledger = await proxy.close("t")
    assert not engine.running
    await asyncio.gather(*clients, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert session.failure is None
    assert not any(segment.busy for segment in ledger.segments)
    assert invariants.check(ledger) == []
    with pytest.raises(ProxyError):
        await proxy.close("t")

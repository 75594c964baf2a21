"""Random conversations under random rewrites keep I1 to I4."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legorl.harness.base import Speaker, ThreadKind
from legorl.proxy import invariants
from legorl.proxy.messages import Message, Role, ToolUse
from legorl.proxy.render import Renderer
from legorl.proxy.store import load, save
from tests.proxy.models import call_text
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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(MOVES), st.sampled_from(REPLIES), st.booleans()), min_size=1, max_size=14
    )
)
def test_any_history_keeps_the_invariants(
    renderer: Renderer, tmp_path_factory: object, moves: list[tuple[str, str, bool]]
) -> None:
    talk = Talk(renderer)
    harness = Harness(talk)
    for move, reply, cut in moves:
        harness.move(move, reply, cut)
    talk.audit()
    directory = tmp_path_factory.mktemp("ledger")  # type: ignore[attr-defined]
    save(talk.ledger, directory)
    again = load(directory)
    assert invariants.check(again) == []
    assert [row.token_ids.tolist() for row in again.rows()] == [
        row.token_ids.tolist() for row in talk.ledger.rows()
    ]


class Harness:
    """Holds a history and rewrites it as real ones do."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.history: list[Message] = [system("You help."), user("Fix it.")]
        self.tools = (BASH,)
        self.count = 0

    def move(self, move: str, reply: str, cut: bool) -> None:
        self.count += 1
        before = list(self.history)
        match move:
            case "reserialise":
                self._rewrite(lambda c: replace(c, arguments=c.arguments.replace(" ", "")))
            case "rename":
                self._rewrite(lambda c: replace(c, name="invalid", arguments="{}"))
            case "remind":
                self._map_last(Role.USER, lambda m: replace(m, text=m.text + "\nreminder"))
            case "merge":
                self._map_last(Role.ASSISTANT, lambda m: replace(m, text="Got it.\n" + m.text))
            case "drop_turn":
                self._drop_last_turn()
            case "compact":
                start = max(2, len(self.history) - 3)
                while start < len(self.history) and self.history[start].role is Role.TOOL:
                    start += 1
                self.history = [self.history[0], user(f"Continued {self.count}."), *self.history[start:]]
            case "rewind":
                self.history = self.history[:2]
            case "tools":
                self.tools = (BASH, replace(BASH, name=f"tool{self.count}"))
            case "leave":
                self.talk.drop(self.history)
            case "side":
                side = Speaker(ThreadKind.SIDE, key=f"title{self.count % 2}")
                self.talk.ask([user("Title?")], "A title.", speaker=side, tools=())
            case "trailing":
                self.talk.ask([*self.history, Message(Role.ASSISTANT, "MAXIMUM")], "x", tools=self.tools)
            case "lost":
                self.talk.ask(self.history, reply, delivered=False, cut=cut, tools=self.tools)
            case "again":
                self.talk.ask(self.history, reply, cut=cut, tools=self.tools)
                self.history = before
        turn = self.talk.ask(self.history, reply, cut=cut, tools=self.tools)
        self.history.append(turn.message)
        results = [result(call, f"output {self.count}") for call in turn.message.calls]
        if move == "reverse_results":
            results.reverse()
        self.history += results or [user(f"Go on {self.count}.")]

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


def _apply(change: object, call: ToolUse) -> ToolUse:
    return change(call)  # type: ignore[operator, no-any-return]

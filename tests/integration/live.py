"""A trial's middle with nothing fake but the policy's mind: real harness, real sandbox, real proxy, and a
scripted engine whose token ids are kept, so that a ledger can be compared with them one by one.

The policy's replies are text of its own making: prose, and calls as `<tool_call>` blocks whose arguments are
passed on raw, malformed ones too.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legorl.config.schema import HarnessConfig
from legorl.engine.base import Parsed, Sample, Sampling, ToolCall
from legorl.engine.scripted import ScriptedEngine
from legorl.errors import EngineError
from legorl.harness.base import Harness, HarnessLimits, Outcome
from legorl.harness.registry import get_harness
from legorl.proxy.invariants import check
from legorl.proxy.ledger import Ledger
from legorl.proxy.proxy import Proxy
from legorl.proxy.render import Renderer
from legorl.sandbox.base import ExecResult, Phase, SandboxSpec, Snapshot
from legorl.sandbox.local import LocalProvider
from legorl.sandbox.seal import sealed_workspace
from tests.integration.leftovers import no_leftovers
from tests.proxy.models import write_model

CACHE = Path(".cache/legorl")
SUMMARY = (
    "<summary>\n1. Primary request: fix add() in calc.py (MAIN-TASK).\n"
    "2. State: calc.py was read; `a - b` is wrong. Next: edit it and run the tests.\n</summary>"
)
TASK = "MAIN-TASK: the test in this repository fails. Fix the bug in calc.py and run check.py.\n"
ROUTING = (2, 2, 8)

Turn = str | Callable[[str], str]
"""A reply, or what makes one from the prompt."""

_COMPACTION = (
    "Respond with TEXT ONLY",
    "context summarization agent",
    "context-aware state summary",
    "CONTEXT CHECKPOINT COMPACTION",
    "component that summarizes a conversation",
)
"""By these words a harness asks for a summary: in the system prompt or in the last user message."""
_MEMORY = "You are now acting as the managed memory"
_CALL = re.compile(r'<tool_call>\n\{"name": "([^"]*)", "arguments": (.*?)\}\n</tool_call>', re.DOTALL)


def call(name: str, arguments: str | dict[str, Any]) -> str:
    """A tool call as the policy writes it; a string of arguments is taken as it is."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {raw}}}\n</tool_call>'


class RawParser:
    """Reads those calls; the text is what stands around them, behind them too."""

    def parse(self, text: str) -> Parsed:
        """See `ReplyParser.parse`."""
        calls = tuple(ToolCall(name, raw) for name, raw in _CALL.findall(text))
        return Parsed(_CALL.sub("", text), calls)


@dataclass(frozen=True)
class Emitted:
    """One answer of the engine: in what conversation, after which prompt, which tokens."""

    who: str
    prompt: NDArray[np.int32]
    ids: NDArray[np.int32]


@dataclass
class Script:
    """The policy: plays `main`, and `sub` in every subagent; a prompt says which conversation it is."""

    main: Sequence[Turn]
    sub: Sequence[Turn] = ()
    played: Counter[str] = field(default_factory=Counter)

    def who(self, prompt: str) -> str:
        """`main`, `sub:A`, `compaction`, `memory` or `title`."""
        opening = prompt.partition("<|im_start|>assistant")[0]
        system = opening.partition("<|im_start|>user")[0]
        last = prompt.rpartition("<|im_start|>user")[2]
        if any(mark in system or mark in last for mark in _COMPACTION):
            return "compaction"
        if _MEMORY in system:
            return "memory"
        if "<tools>" not in opening:
            return "title"
        task = re.search(r"SUBTASK-MARK (\w)", opening)
        return f"sub:{task[1]}" if task and "MAIN-TASK" not in opening else "main"

    def __call__(self, prompt: str, rng: random.Random) -> str:
        """See `legorl.engine.scripted.Policy`."""
        who = self.who(prompt)
        side = {"compaction": SUMMARY, "memory": "Nothing to keep.", "title": "Fix add()"}
        if who in side:
            return side[who]
        turns = self.main if who == "main" else self.sub
        number = self.played[who]
        self.played[who] += 1
        turn = turns[number] if number < len(turns) else f"Finished ({who})."
        return turn if isinstance(turn, str) else turn(prompt)


class RecordingEngine(ScriptedEngine):
    """Keeps what it was given and what it gave; dies after `dies_after` answers."""

    def __init__(self, script: Script, renderer: Renderer, dies_after: int) -> None:
        super().__init__(script, renderer.tokenizer, routing=ROUTING)
        self.script, self._decoder, self._dies_after = script, renderer.tokenizer, dies_after
        self.emitted: dict[str, Emitted] = {}

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        routed_from: int = 0,
        sticky: str = "",
    ) -> Sample:
        """See `TokenEngine.generate`."""
        if len(self.emitted) >= self._dies_after:
            raise EngineError("the engine died")
        prompt = np.array(prompt_ids, dtype=np.int32)
        who = self.script.who(self._decoder.decode(prompt.tolist(), skip_special_tokens=False))
        sample = await super().generate(request_id, prompt, sampling, routed_from=routed_from, sticky=sticky)
        self.emitted[request_id] = Emitted(who, prompt, sample.token_ids.copy())
        return sample


@dataclass
class Lived:
    """What a trial left."""

    outcome: Outcome
    result: ExecResult
    snapshot: Snapshot
    ledger: Ledger
    engine: RecordingEngine
    script: Script
    mark: str | None

    def turns(self, who: str) -> list[Emitted]:
        """Answers in one conversation, in the order of their requests."""
        return [emitted for emitted in self.engine.emitted.values() if emitted.who == who]

    @property
    def last_prompt(self) -> str:
        """Text of the main conversation as the policy saw it last."""
        renderer = self.engine._decoder
        return str(renderer.decode(self.turns("main")[-1].prompt.tolist(), skip_special_tokens=False))


def repository(root: Path) -> Path:
    """A small repository with a failing test."""
    root.mkdir(parents=True)
    (root / "calc.py").write_text(
        '"""Tiny calculator."""\n\n\ndef add(a, b):\n    return a - b\n\n\n'
        "def mean(xs):\n    return sum(xs) / len(xs)\n"
    )
    (root / "check.py").write_text(
        "from calc import add, mean\n\nassert add(2, 3) == 5, add(2, 3)\nassert mean([1, 2, 3]) == 2\n"
        "print('2 passed')\n"
    )
    return root


@contextlib.asynccontextmanager
async def adapter(name: str, profile: str = "lean") -> AsyncIterator[Harness]:
    """A packaged harness, installed; it leaves nothing behind."""
    harness = get_harness(HarnessConfig(name=name, profile=profile))
    harness.install(CACHE)
    with no_leftovers():
        try:
            yield harness
        finally:
            await harness.close()


async def live(
    harness: Harness,
    script: Script,
    tmp_path: Path,
    *,
    limits: HarnessLimits,
    trial_tokens: int = 1 << 20,
    dies_after: int = 1 << 20,
    deadline_s: float = 150.0,
) -> Lived:
    """Run an installed harness on the small repository to its end.

    The proxy keeps the context size and `trial_tokens`; the number of turns is the harness's own to keep. The
    engine dies after `dies_after` answers.
    """
    renderer = Renderer.load(write_model(tmp_path / "model"))
    engine = RecordingEngine(script, renderer, dies_after)
    proxy = Proxy(engine, renderer, RawParser(), context_tokens=limits.context_tokens)
    provider = LocalProvider()
    sampling = Sampling(max_tokens=limits.reply_tokens)
    try:
        workspace = sealed_workspace(repository(tmp_path / "repo"), tmp_path / "cache")
        spec = SandboxSpec("t1", workspace, harness.mounts(CACHE))
        sandbox = await provider.start(spec)
        try:
            session = proxy.open(
                "t1", speaker=harness.speaker, sampling=sampling, turn_limit=1000, trial_tokens=trial_tokens
            )
            url = await sandbox.connect_proxy(proxy)
            await sandbox.set_phase(Phase.AGENT)
            launch = harness.command(TASK, f"{url}/t/t1", session.token, limits)
            result = await harness.run(sandbox, launch, deadline_s)
            print(f"{harness.name}: exit code {result.code} after {result.seconds:.1f} s")
            for stream in (result.stdout[-3000:], result.stderr[-2000:]):
                print(stream.decode(errors="replace"))
            outcome = await harness.outcome(sandbox, result)
            await sandbox.set_phase(Phase.VERIFY)
            snapshot = await sandbox.snapshot()
        finally:
            await sandbox.stop()
        ledger = await proxy.close("t1")
    finally:
        await proxy.aclose()
        await provider.close()
    assert not engine.running
    return Lived(outcome, result, snapshot, ledger, engine, script, session.mark)


def check_provenance(lived: Lived) -> Counter[str]:
    """Every invariant, and every token id against what the engine really gave; returns the orphans' reasons.

    Each answer that the harness received is in exactly one row, all of it and with mask 1, behind exactly the
    prompt that the engine saw; and it is in the thread of the conversation that the script played it in.
    """
    ledger, emitted = lived.ledger, lived.engine.emitted
    assert check(ledger) == []
    turns = {turn.id: turn for turn in ledger.turns}
    assert turns.keys() == emitted.keys()
    rows = ledger.rows(tuple(ledger.threads))
    calls = {call.id: (row, call) for row in rows for call in row.calls}
    assert len(calls) == sum(len(row.calls) for row in rows), "a reply is in two rows"
    assert calls.keys() == {name for name, turn in turns.items() if not turn.orphan}
    for name, (row, span) in calls.items():
        known = emitted[name]
        assert np.array_equal(row.token_ids[span.start : span.end], known.ids), name
        assert np.array_equal(row.token_ids[: span.start], known.prompt), name
        assert row.loss_mask[span.start : span.end].all(), name
        assert np.isfinite(row.logprobs[span.start : span.end]).all(), name
        thread = ledger.threads[row.thread]
        kind, _, _ = known.who.partition(":")
        assert thread.kind.value == {"main": "main", "sub": "subagent"}.get(kind, "side"), (known.who, thread)
    in_loss = sum(int(row.loss_mask.sum()) for row in rows)
    assert in_loss == sum(len(emitted[name].ids) for name in calls)
    subagents = {known.who: set[str]() for known in emitted.values() if known.who.startswith("sub:")}
    for name, (row, _) in calls.items():
        if emitted[name].who in subagents:
            subagents[emitted[name].who].add(row.thread)
    assert all(len(threads) == 1 for threads in subagents.values()), subagents
    distinct = {min(threads) for threads in subagents.values()}
    assert len(distinct) == len(subagents), "two subagents in one thread"
    return Counter(turn.orphan for turn in ledger.turns if turn.orphan)

"""A proxy to measure: the real application over an engine that costs nothing, and one that re-renders.

Everything between the bytes of a request and the bytes of its answer is measured; the engine only looks up
tokens and routing rows that were made before.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.traffic import CLAUDE_CODE, CODEX, Dialect, Step, bodies
from legorl.engine.base import Finish, Parsed, Sample, Sampling, ToolCall
from legorl.harness.speakers import RULES
from legorl.proxy.app import App, Event, Scope
from legorl.proxy.messages import ChatRequest, Message, Reply, Role, ToolUse
from legorl.proxy.render import Renderer
from legorl.proxy.segment import Ids
from legorl.proxy.session import Serving, Session
from legorl.proxy.sessions import Sessions
from legorl.proxy.wire import WireFormat, compact
from legorl.proxy.wire_anthropic import Anthropic
from legorl.proxy.wire_openai_chat import OpenAIChat
from legorl.proxy.wire_openai_responses import OpenAIResponses

LAYERS, EXPERTS_PER_TOKEN = 40, 8
_CHUNK = 64 << 10
"""Bodies arrive in pieces, as from a socket."""
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


class CountingRenderer(Renderer):
    """Counts what it tokenises."""

    encoded = 0

    def encode(self, text: str) -> Ids:
        """See `Renderer.encode`."""
        ids = super().encode(text)
        self.encoded += len(ids)
        return ids


class Hermes:
    """Reads tool calls as vLLM's parser of that name does."""

    def parse(self, text: str) -> Parsed:
        """See `ReplyParser.parse`."""
        calls = [json.loads(call) for call in _CALL.findall(text)]
        return Parsed(
            text[: text.find("<tool_call>")],
            tuple(
                ToolCall(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls
            ),
        )


class Playback:
    """An engine that gives the n-th request of a trial the n-th reply."""

    def __init__(self, replies: Sequence[Ids], routing: NDArray[np.uint8] | None) -> None:
        self._replies = replies
        self._routing = routing
        self.rows = 0
        """Routing rows asked for so far."""

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
        await asyncio.sleep(0)
        ids = self._replies[int(request_id.rpartition(".")[2]) - 1]
        rows = None
        if self._routing is not None:
            rows = self._routing[routed_from : len(prompt_ids) + len(ids) - 1]
            self.rows += len(rows)
        zeros = np.zeros(len(ids), np.int32)
        return Sample(ids, zeros.astype(np.float32), zeros, Finish.STOP, rows, routed_from)

    async def abort(self, request_id: str) -> None:
        """See `TokenEngine.abort`."""

    async def close(self) -> None:
        """See `TokenEngine.close`."""


@dataclass(frozen=True)
class Call:
    """One request as it was served."""

    prompt: int
    """Tokens."""
    new: int
    """Tokens of the record that came with it: what was appended to the prompt, and the reply."""
    cpu_s: float
    encoded: int
    """Tokens that were tokenised."""
    rows: int
    """Routing rows that were asked for."""


class Stage:
    """Trials of one harness on one proxy."""

    def __init__(
        self,
        model: Path,
        dialect: Dialect,
        steps: Sequence[Step],
        *,
        routing: NDArray[np.uint8] | None = None,
    ) -> None:
        self.renderer = CountingRenderer.load(model)
        self.steps = steps
        self.engine = Playback([self.renderer.encode(step.sampled) for step in steps], routing)
        self._dialect = dialect
        self._sessions = Sessions()
        self._app = App(self._sessions)
        opening = dialect.opening()
        self._path = opening["path"].partition("?")[0]
        self._headers = [
            (name.lower().encode(), value.encode())
            for name, value in opening["headers"]
            if name.lower() not in ("authorization", "content-length")
        ]

    def open(self, trial: str) -> Session:
        """A trial whose tool-call ids are those of `bodies`."""
        ids = iter(self.call_ids())
        serving = Serving(self.engine, self.renderer, Hermes(), 1 << 20)
        session = Session(
            trial,
            serving,
            speaker=RULES[self._dialect.name],
            sampling=Sampling(max_tokens=1 << 12),
            turn_limit=1 << 20,
            trial_tokens=1 << 30,
            new_call_id=lambda: next(ids).removeprefix(self._dialect.call_prefix),
        )
        self._sessions.add(session)
        return session

    def close(self, session: Session) -> None:
        """Forget a trial."""
        self._sessions.remove(session.trial)

    def call_ids(self) -> list[str]:
        """Of every trial's turns."""
        return [f"{self._dialect.call_prefix}{index:024x}" for index in range(len(self.steps))]

    async def call(self, session: Session, raw: bytes) -> Call:
        """Send a body and say what it cost."""
        encoded, rows = self.renderer.encoded, self.engine.rows
        before = sum(map(len, session.ledger.segments))
        start = time.process_time()
        await self.send(session, raw)
        cpu_s = time.process_time() - start
        return Call(
            prompt=session.ledger.turns[-1].start,
            new=sum(map(len, session.ledger.segments)) - before,
            cpu_s=cpu_s,
            encoded=self.renderer.encoded - encoded,
            rows=self.engine.rows - rows,
        )

    async def send(self, session: Session, raw: bytes) -> bytes:
        """One request through the application."""
        pieces = [raw[at : at + _CHUNK] for at in range(0, len(raw), _CHUNK)]
        events = [
            {"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1}
            for index, piece in enumerate(pieces)
        ]
        arrivals, answer = iter(events), []

        async def receive() -> Event:
            for event in arrivals:
                return event
            await asyncio.Event().wait()  # the client stays
            raise AssertionError

        async def send(event: Event) -> None:
            answer.append(event)

        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": f"/t/{session.trial}{self._path}",
            "headers": [*self._headers, (b"authorization", f"Bearer {session.token}".encode())],
        }
        await self._app(scope, receive, send)
        assert answer[0]["status"] == 200, answer
        return b"".join(event.get("body", b"") for event in answer)

    def bodies(self) -> list[bytes]:
        """One for each step."""
        return list(bodies(self._dialect, self.steps, self.call_ids()))

    @property
    def wire(self) -> WireFormat:
        """The dialect's."""
        wires = {CLAUDE_CODE.name: Anthropic, CODEX.name: OpenAIResponses}
        return wires.get(self._dialect.name, OpenAIChat)()


class Rerendering:
    """The same wires and renderer without a ledger: each request is rendered and tokenised from the start."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._wire = stage, stage.wire

    def read(self, raw: bytes) -> ChatRequest:
        """What a body says."""
        return self._wire.parse(json.loads(raw))

    async def send(self, raw: bytes, number: int, call_id: str) -> bytes:
        """Answer request `number` (from 0) of a trial."""
        request = self.read(raw)
        prompt = self._stage.renderer.render_full(request.messages, request.tools)
        sample = await self._stage.engine.generate(f"x.{number + 1}", prompt, Sampling())
        parsed = Hermes().parse(self._stage.renderer.decode(sample.token_ids))
        calls = tuple(ToolUse(call_id, call.name, call.arguments) for call in parsed.calls)
        message = Message(Role.ASSISTANT, parsed.text, calls=calls)
        reply = Reply("x", message, sample.finish, len(prompt), len(sample.token_ids))
        if request.stream:
            return b"".join(self._wire.events(reply, request))
        return compact(self._wire.reply(reply, request))

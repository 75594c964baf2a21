"""One trial's open account with the proxy: its token, its budgets, its requests in flight.

Invariants: sampling parameters are the run's; a request is answered once however often it is sent while it
is in flight; when the last client waiting for it is gone its engine request is aborted; after `close` nothing
of the trial runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from legorl.engine.base import Finish, ReplyParser, Sample, Sampling, TokenEngine
from legorl.errors import EngineError, InfrastructureError, ProxyError
from legorl.harness.base import Speaker, ThreadKind
from legorl.proxy.body import BodyReader
from legorl.proxy.echoes import Turn
from legorl.proxy.ledger import Ledger, Plan, thread_name
from legorl.proxy.length import exceeds
from legorl.proxy.messages import ChatRequest, Json, Message, Reply, Role, ToolUse
from legorl.proxy.refusal import Reason, Refusal, invalid
from legorl.proxy.render import Renderer

SpeakerOf = Callable[[Mapping[str, str], Mapping[str, Any]], Speaker]
"""Tells who speaks from a request's headers (lower-case names) and body."""

ABORT_TIMEOUT_S = 10.0
BODIES = 8
FLIGHTS = 64
"""Requests of one trial in flight; no harness has so many subagents."""


@dataclass(frozen=True)
class Serving:
    """What all sessions of a proxy share."""

    engine: TokenEngine
    renderer: Renderer
    parser: ReplyParser
    context_tokens: int
    observed: bool = False
    """Turns that a harness shows changed count as it shows them (`Ledger`)."""


@dataclass(eq=False)
class _Reserved:
    """What a request takes before it is answered, and gives back if it is not."""

    plan: Plan
    sampling: Sampling
    main: bool
    committed: bool = False


@dataclass(eq=False)
class _Flight:
    key: object
    """What a request must equal to share the answer."""
    task: asyncio.Task[tuple[Turn, Reply]]
    waiting: int = 0


class Session:
    """See the module. Made by `Proxy.open`."""

    def __init__(
        self,
        trial: str,
        serving: Serving,
        *,
        speaker: SpeakerOf,
        sampling: Sampling,
        turn_limit: int,
        trial_tokens: int,
        new_call_id: Callable[[], str] | None = None,
    ) -> None:
        self.trial = trial
        self.token = secrets.token_urlsafe(24)
        self.bodies = BodyReader()
        self.receiving = asyncio.Semaphore(BODIES)
        """Held while a body is on its way: what arrives at once is bounded."""
        self.ledger = Ledger(trial, serving.renderer, observed=serving.observed)
        self.mark: str | None = None
        """Budget that ran out: `turn_limit`, `token_limit` or `context_overflow` (names of terminations)."""
        self.failure: InfrastructureError | None = None
        self.ended = asyncio.Event()
        """Set with `mark` or `failure`: nothing good can come of the trial any more."""
        self.turns = 0
        """Replies given or in flight on the main thread."""
        self._serving = serving
        self._speaker = speaker
        self._sampling = sampling
        self._turn_limit = turn_limit
        self._trial_tokens = trial_tokens
        self._new_call_id = new_call_id or (lambda: secrets.token_hex(12))
        self._flights: list[_Flight] = []
        """Few, and compared by equality: a long history differs early or is made of the same objects."""
        self._tasks: set[asyncio.Task[tuple[Turn, Reply]]] = set()
        self._closed = False
        self._requests = 0
        self._promised = 0
        """Tokens that requests in flight may still sample."""

    def speaker(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> Speaker:
        """Who sent the request. Raises `Refusal` where the harness's own rules cannot read it."""
        try:
            return self._speaker(headers, body)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise invalid(f"the request does not look like one of this harness: {error!r}") from error

    def count_tokens(self, request: ChatRequest, speaker: Speaker) -> int:
        """Prompt tokens the request would have. Raises `Refusal` for far more than the context holds."""
        self._refuse_when_over()
        if self._too_long(request):
            raise Refusal(Reason.OVERFLOW, self._far_more())
        return self.ledger.prompt_tokens(request, speaker)

    async def complete(
        self, request: ChatRequest, speaker: Speaker, call_id_prefix: str
    ) -> tuple[Turn, Reply]:
        """Answer a request. Cancel it when the client is gone.

        Raises:
            Refusal: with the reason; `mark` or `failure` is set where it is more than a bad request.
        """
        self._refuse_when_over()
        self._note_wishes(request.wishes)
        key = (thread_name(speaker), request.tools_key, request.messages)
        flight = next((flight for flight in self._flights if flight.key == key), None)
        if flight is None:
            if len(self._flights) >= FLIGHTS:
                raise Refusal(Reason.BUSY, f"{FLIGHTS} requests are in flight")
            reserved = self._reserve(request, speaker)
            self._requests += 1
            request_id = f"{self.trial}.{self._requests}"
            task = asyncio.create_task(self._sample(reserved, request_id, call_id_prefix), name=request_id)
            flight = _Flight(key, task)
            self._flights.append(flight)
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._landed(done, reserved))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if self._closed and flight.task.done():
                raise _closing() from None
            raise
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                self._flights.remove(flight)
                flight.task.cancel()

    async def close(self) -> Ledger:
        """Abort what is in flight, settle the ledger."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.ledger.finish()
        return self.ledger

    def fail(self, error: InfrastructureError) -> None:
        """Remember the first thing that broke."""
        self.failure = self.failure or error
        self.ended.set()

    def _landed(self, task: asyncio.Task[tuple[Turn, Reply]], reserved: _Reserved) -> None:
        """A request has ended, be it before its task ran at all."""
        self._tasks.discard(task)
        self._flights = [flight for flight in self._flights if flight.task is not task]
        self._promised -= reserved.sampling.max_tokens
        if not reserved.committed:
            self.ledger.rollback(reserved.plan)
            self.turns -= reserved.main
        if not task.cancelled():
            task.exception()  # seen here, in case no client is left to see it

    def _reserve(self, request: ChatRequest, speaker: Speaker) -> _Reserved:
        main = speaker.kind is ThreadKind.MAIN
        if main and self.turns >= self._turn_limit:
            raise self._over("turn_limit", f"the trial's limit of {self._turn_limit} turns is reached")
        budget = self._trial_tokens - self.ledger.sampled_tokens
        if budget <= 0:
            raise self._over("token_limit", f"the trial's {self._trial_tokens} sampled tokens are used up")
        if self._too_long(request):
            raise self._over("context_overflow", self._far_more())
        plan = self.ledger.begin(request, speaker)
        prompt, context = len(plan.segment), self._serving.context_tokens
        if prompt >= context:
            self.ledger.rollback(plan)
            raise self._over("context_overflow", f"{prompt} tokens > {context} maximum")
        limit = min(self._sampling.max_tokens, budget, context - prompt)
        if limit > budget - self._promised:
            self.ledger.rollback(plan)
            raise Refusal(Reason.BUSY, "the trial's last tokens are promised to requests in flight")
        self.turns += main
        self._promised += limit
        return _Reserved(plan, dataclasses.replace(self._sampling, max_tokens=limit), main)

    def _too_long(self, request: ChatRequest) -> bool:
        return exceeds(request, self._serving.context_tokens, self._serving.renderer.encode)

    def _far_more(self) -> str:
        return f"far more tokens than the {self._serving.context_tokens} of the context"

    async def _sample(self, reserved: _Reserved, request_id: str, call_id_prefix: str) -> tuple[Turn, Reply]:
        plan, sampling, engine = reserved.plan, reserved.sampling, self._serving.engine
        try:
            sample = await engine.generate(
                request_id,
                plan.prompt_ids,
                sampling,
                routed_from=plan.segment.routed_rows,
                sticky=self.trial,
            )
            self._check(sample, sampling)
            prompt_tokens = len(plan.segment)
            message = self._message(sample, call_id_prefix)
            turn = self.ledger.commit(plan, request_id, sample, message)
            reserved.committed = True
        except asyncio.CancelledError:
            await self._abort(request_id)
            raise
        except InfrastructureError as error:
            self.fail(error)
            raise Refusal(Reason.BROKEN, "the engine failed") from error
        except Exception as error:  # a bug of ours must exclude the trial, not look like the agent's end
            self.fail(ProxyError(f"trial {self.trial}: {error!r}"))
            raise Refusal(Reason.BROKEN, "the proxy failed") from error
        if sample.finish is Finish.LENGTH and sampling.max_tokens < self._sampling.max_tokens:
            spent = self.ledger.sampled_tokens >= self._trial_tokens
            self._set_mark("token_limit" if spent else "context_overflow")
        reply = Reply(request_id, message, sample.finish, prompt_tokens, len(sample.token_ids))
        return turn, reply

    async def _abort(self, request_id: str) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._serving.engine.abort(request_id)
        except (TimeoutError, InfrastructureError) as error:
            self.fail(EngineError(f"request {request_id} could not be aborted: {error!r}"))

    def _check(self, sample: Sample, sampling: Sampling) -> None:
        count = len(sample.token_ids)
        if sample.finish is Finish.ABORT:
            raise EngineError("the engine aborted a request that nobody asked it to abort")
        if count == 0:
            raise EngineError("the engine returned no token")
        if count > sampling.max_tokens:
            raise EngineError(f"the engine returned {count} tokens, {sampling.max_tokens} were asked for")
        if len(sample.logprobs) != count or len(sample.weight_version) != count:
            raise EngineError(
                "the engine returned tokens, log-probs and weight versions of different lengths"
            )

    def _message(self, sample: Sample, call_id_prefix: str) -> Message:
        parsed = self._serving.parser.parse(self._serving.renderer.decode(sample.token_ids))
        calls = tuple(
            ToolUse(call_id_prefix + self._new_call_id(), _whole(call.name), _whole(call.arguments))
            for call in parsed.calls
        )
        return Message(Role.ASSISTANT, parsed.text, calls=calls, reasoning=parsed.reasoning)

    def _refuse_when_over(self) -> None:
        if self._closed:
            raise _closing()
        if self.failure is not None:
            raise Refusal(Reason.BROKEN, "the trial has failed")

    def _over(self, mark: str, message: str) -> Refusal:
        self._set_mark(mark)
        return Refusal(Reason.OVERFLOW, message)

    def _set_mark(self, mark: str) -> None:
        self.mark = self.mark or mark
        self.ended.set()

    def _note_wishes(self, wishes: Mapping[str, Json]) -> None:
        for name, value in wishes.items():
            if getattr(self._sampling, name, None) != value:
                values = self.ledger.wishes.setdefault(name, [])
                if value not in values and len(values) < 16:
                    values.append(value)


def _whole(text: str) -> str:
    """Without halves of surrogate pairs, which a parser makes of a policy's escapes and no encoding has."""
    return text.encode(errors="replace").decode()


def _closing() -> Refusal:
    return Refusal(Reason.BROKEN, "the trial is closed")

"""The agent phase: the harness works through the proxy until it, or a budget that the proxy keeps, ends it.

Invariants: the ledger is closed and checked on every path; of several failures at once the first cause
counts, not what the harness made of it: a dead engine or a dead sandbox is not the harness's failure or end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from legorl.config.schema import Config
from legorl.engine.base import Sampling
from legorl.errors import (
    HarnessError,
    InfrastructureError,
    IntegrityError,
    ProxyError,
    SandboxExecError,
    SetupDeadlineError,
    TransferError,
)
from legorl.harness.base import Harness, HarnessLimits, Launch, Outcome
from legorl.proxy.invariants import check
from legorl.proxy.proxy import Proxy
from legorl.proxy.session import Session
from legorl.proxy.transcript import Transcript
from legorl.sandbox.base import ExecResult, Sandbox
from legorl.trial.phases import PhaseClock

AGENT_GRACE_S = 15.0
"""A harness that has not returned so long after its own deadline is broken."""
REFUSED_GRACE_S = 10.0
"""A harness that goes on so long after its budget was refused is ended."""
PROXY_S = 30.0
_ALIVE_S = 10.0
_MAY_BE_DEAD = (HarnessError, IntegrityError, TransferError, SetupDeadlineError)
"""Failures that a sandbox which is gone may look like."""


@dataclass
class Conversation:
    """What the phase leaves, also when it failed."""

    ledger: Transcript | None = None
    result: ExecResult | None = None
    violations: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentPhase:
    """See the module."""

    proxy: Proxy
    harness: Harness
    config: Config
    clock: PhaseClock
    left: Conversation

    async def run(
        self,
        sandbox: Sandbox,
        url: str,
        trial_id: str,
        instruction: str,
        opened: Callable[[Session], None] = lambda session: None,
    ) -> Outcome:
        """The harness's end.

        Args:
            sandbox: in the agent phase, connected to the proxy.
            url: of the proxy as seen from inside.
            opened: told of the trial's session before the harness starts.

        Raises:
            InfrastructureError: the first cause.
        """
        engine = self.config.engine
        session = self.proxy.open(
            trial_id,
            speaker=self.harness.speaker,
            sampling=Sampling(engine.temperature, engine.top_p, engine.top_k, engine.reply_tokens),
            turn_limit=self.config.harness.turn_limit,
            trial_tokens=engine.trial_tokens,
        )
        opened(session)
        try:
            launch = self.harness.command(
                instruction, f"{url}/t/{trial_id}", session.token, harness_limits(self.config)
            )
            async with self.clock.phase("agent", self.config.harness.deadline_s + AGENT_GRACE_S):
                ending = await self._work(sandbox, launch, session)
            if ending.termination == "agent_deadline":
                await alive(sandbox)
        except InfrastructureError as error:
            # A harness breaks on a dead engine too: the first cause is the one that counts.
            if session.failure is not None and error is not session.failure:
                raise session.failure from error
            await blame(sandbox, error)
            raise
        finally:
            self.left.ledger = await self.clock.cleanup("stop", self.proxy.close(trial_id), PROXY_S)
        if session.failure is not None:
            raise session.failure
        self.left.violations = tuple(check(self.left.ledger))
        if self.left.violations:
            raise ProxyError(f"Ledger invariants do not hold: {'; '.join(self.left.violations[:3])}")
        return ending

    async def _work(self, sandbox: Sandbox, launch: Launch, session: Session) -> Outcome:
        """The harness's end, or that of a budget the proxy keeps.

        A budget that ran out explains whatever the harness made of the refusal, but for a submission.
        """
        work = asyncio.ensure_future(self.harness.run(sandbox, launch, self.config.harness.deadline_s))
        over = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait({work, over}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and session.mark != "context_overflow":  # after that one, it may compact
                await asyncio.wait({work}, timeout=REFUSED_GRACE_S)
                if not work.done():
                    return Outcome(session.mark or "infrastructure", "the harness went on after the refusal")
            self.left.result = await work
            ending = await self.harness.outcome(sandbox, self.left.result)
        except HarnessError as error:
            if session.mark is None:
                raise
            ending = Outcome(session.mark, f"the harness broke on the refusal: {error}")
        finally:
            for task in (work, over):
                task.cancel()
            await asyncio.gather(work, over, return_exceptions=True)
        if session.mark is not None and ending.termination not in (session.mark, "submitted"):
            return Outcome(session.mark, f"the harness ended with {ending.termination}")
        return ending


async def alive(sandbox: Sandbox) -> None:
    """Raises `SandboxExecError` for a sandbox in which nothing can be executed any more."""
    await sandbox.exec(["true"], timeout_s=_ALIVE_S, cwd="/")


async def blame(sandbox: Sandbox, error: InfrastructureError) -> None:
    """Raises `SandboxExecError` from an error that a dead sandbox explains; returns if the sandbox lives."""
    if isinstance(error, _MAY_BE_DEAD):
        try:
            await alive(sandbox)
        except SandboxExecError as gone:
            raise gone from error


def harness_limits(config: Config) -> HarnessLimits:
    """What the configuration hands to the harness's own settings."""
    return HarnessLimits(
        turns=config.harness.turn_limit,
        context_tokens=config.engine.max_model_len,
        reply_tokens=config.engine.reply_tokens,
        command_timeout_s=config.harness.command_timeout_s,
    )

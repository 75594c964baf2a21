"""The life of one trial: start, seal, let the agent work, take what it left, grade it, write it down.

Invariants: whatever happens, a trial ends with a record, and nothing of it stays behind: no sandbox, no open
route on the proxy. A failure around the agent is never taken for one of its own ends (I5). The agent's
sandbox is gone before grading begins, and no reward exists without grading (I6).
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from legorl.config.schema import Config
from legorl.engine.base import Sampling
from legorl.errors import HarnessError, InfrastructureError, ProxyError
from legorl.harness.base import Harness, HarnessLimits, Launch, Outcome
from legorl.proxy.invariants import check
from legorl.proxy.proxy import Proxy
from legorl.proxy.row import Row
from legorl.proxy.session import Session
from legorl.proxy.transcript import Transcript
from legorl.sandbox.base import ExecResult, Limits, Phase, Sandbox, SandboxProvider, SandboxSpec, Snapshot
from legorl.sandbox.seal import sealed_workspace
from legorl.tasks.task import Task
from legorl.trial.archive import Remains, trial_directory, write_trial
from legorl.trial.behaviour import behaviour
from legorl.trial.phases import PhaseClock, ending_of
from legorl.trial.record import Behaviour, TrialRecord
from legorl.trial.summary import count, steps_of
from legorl.trial.termination import is_excluded
from legorl.trial.verify import STOP_S, Verification, grade

SEAL_S = 120.0
START_GRACE_S = 5.0
"""The provider keeps `sandbox.start_timeout_s` itself; this is for one that does not."""
AGENT_GRACE_S = 15.0
"""A harness that has not returned so long after its own deadline is broken."""
REFUSED_GRACE_S = 10.0
"""A harness that goes on so long after its budget was refused is ended."""
PROXY_S = 30.0
_SUBMITTED = frozenset({"submitted", "stopped"})
"""Ends by the agent's own declaration: a submission, or a turn without further calls."""


@dataclass(frozen=True)
class TrialRequest:
    """One trial to run. `trial_id` is unique in the run; `group` names the trials of one task in one step."""

    task: Task
    trial_id: str
    group: str
    step: int
    split: str


@dataclass(frozen=True)
class TrialResult:
    """What came of it. `rows` is empty for an excluded trial; its record and directory keep everything."""

    record: TrialRecord
    rows: list[Row]


class TrialRunner:
    """Runs trials, at most `sandbox.concurrency` of them at once."""

    def __init__(
        self,
        provider: SandboxProvider,
        proxy: Proxy,
        harness: Harness,
        config: Config,
        run_dir: Path,
        *,
        seal: Callable[[Path, Path], Path] = sealed_workspace,
    ) -> None:
        """
        Args:
            run_dir: trials are recorded below its `trials/`.
            seal: workspace and cache directory to the workspace an agent may see.
        """
        self.provider, self.proxy, self.harness = provider, proxy, harness
        self.config, self.run_dir, self.seal = config, run_dir, seal
        self.cache = Path(config.paths.cache)
        self.mounts = harness.mounts(self.cache)
        self.limits = Limits(
            memory_mb=config.sandbox.memory_mb, pids=config.sandbox.pids, disk_mb=config.sandbox.disk_mb
        )
        self._slots = asyncio.Semaphore(config.sandbox.concurrency)

    async def run(self, request: TrialRequest) -> TrialResult:
        """Run one trial to its record. Raises nothing but `CancelledError`."""
        async with self._slots:
            return await _Trial(self, request).live()


class _Trial:
    """One trial under way; the fields fill up as it proceeds."""

    def __init__(self, runner: TrialRunner, request: TrialRequest) -> None:
        self.runner, self.request, self.config = runner, request, runner.config
        self.clock = PhaseClock()
        self.ledger: Transcript | None = None
        self.result: ExecResult | None = None
        self.snapshot: Snapshot | None = None
        self.verification: Verification | None = None
        self.violations: tuple[str, ...] = ()
        self._directory = trial_directory(runner.run_dir, request.step, request.trial_id)

    async def live(self) -> TrialResult:
        """Everything, with every failure turned into a termination."""
        trace = ""
        with self.clock.timed("total"):
            try:
                ending = await self._with_agent()
                if not self._excluded(ending):
                    self.verification = await self._grade()
            except Exception as error:
                ending = ending_of(error)
                trace = traceback.format_exc()
        rows = self._rows()
        record = self._record(ending, rows)
        remains = Remains(self.ledger, self.result, self.snapshot, self.verification, trace)
        try:
            await asyncio.to_thread(write_trial, record, remains, self._directory)
        except InfrastructureError as error:
            record = self._record(ending_of(error), rows)
        return TrialResult(record, [] if record.excluded else rows)

    def _excluded(self, ending: Outcome) -> bool:
        loosened = self.config.filter.exclude_agent_deadline
        return is_excluded(ending.termination, exclude_agent_deadline=loosened)

    @contextlib.asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Sandbox]:
        """The agent's sandbox: started with the sealed workspace, stopped on every path."""
        request, runner = self.request, self.runner
        start_s = self.config.sandbox.start_timeout_s
        async with self.clock.phase("seal", SEAL_S):
            workspace = await asyncio.to_thread(runner.seal, request.task.workspace, runner.cache)
        async with self.clock.phase("start", start_s + START_GRACE_S):
            sandbox = await runner.provider.start(
                SandboxSpec(
                    trial_id=request.trial_id,
                    workspace=workspace,
                    mounts=runner.mounts,
                    limits=runner.limits,
                    start_timeout_s=start_s,
                )
            )
        try:
            yield sandbox
        finally:
            await self.clock.cleanup("stop", sandbox.stop(), STOP_S)

    async def _with_agent(self) -> Outcome:
        """From the start of the sandbox to its end; leaves ledger and snapshot."""
        async with self._sandbox() as sandbox:
            ending = await self._converse(sandbox)
            if not self._excluded(ending):
                async with self.clock.phase("snapshot", self.config.sandbox.transfer_timeout_s):
                    await sandbox.set_phase(Phase.VERIFY)
                    self.snapshot = await sandbox.snapshot()
            return ending

    async def _converse(self, sandbox: Sandbox) -> Outcome:
        """Let the harness work; the ledger is closed and checked on every path."""
        request, runner, engine = self.request, self.runner, self.config.engine
        session = runner.proxy.open(
            request.trial_id,
            speaker=runner.harness.speaker,
            sampling=Sampling(engine.temperature, engine.top_p, engine.top_k, engine.reply_tokens),
            turn_limit=self.config.harness.turn_limit,
            trial_tokens=engine.trial_tokens,
        )
        try:
            async with self.clock.phase("setup", PROXY_S):
                url = await sandbox.connect_proxy(runner.proxy)
                await sandbox.set_phase(Phase.AGENT)
            launch = runner.harness.command(
                request.task.instruction, f"{url}/t/{request.trial_id}", session.token, self._harness_limits()
            )
            async with self.clock.phase("agent", self.config.harness.deadline_s + AGENT_GRACE_S):
                ending = await self._agent(sandbox, launch, session)
        except InfrastructureError as error:
            # A harness breaks on a dead engine too: the first cause is the one that counts.
            if session.failure is None or error is session.failure:
                raise
            raise session.failure from error
        finally:
            self.ledger = await self.clock.cleanup("stop", runner.proxy.close(request.trial_id), PROXY_S)
        if session.failure is not None:
            raise session.failure
        self.violations = tuple(check(self.ledger))
        if self.violations:
            raise ProxyError(f"Ledger invariants do not hold: {'; '.join(self.violations[:3])}")
        return ending

    async def _agent(self, sandbox: Sandbox, launch: Launch, session: Session) -> Outcome:
        """The harness's end, or that of a budget the proxy keeps.

        A budget that ran out explains whatever the harness made of the refusal, but for a submission.
        """
        harness, deadline_s = self.runner.harness, self.config.harness.deadline_s
        work = asyncio.ensure_future(harness.run(sandbox, launch, deadline_s))
        over = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait({work, over}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and session.mark != "context_overflow":  # after that one, it may compact
                await asyncio.wait({work}, timeout=REFUSED_GRACE_S)
                if not work.done():
                    return Outcome(session.mark or "infrastructure", "the harness went on after the refusal")
            self.result = await work
            ending = await harness.outcome(sandbox, self.result)
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

    def _harness_limits(self) -> HarnessLimits:
        config = self.config
        return HarnessLimits(
            turns=config.harness.turn_limit,
            context_tokens=config.engine.max_model_len,
            reply_tokens=config.engine.reply_tokens,
            command_timeout_s=config.harness.command_timeout_s,
        )

    async def _grade(self) -> Verification:
        request, runner, sandbox = self.request, self.runner, self.config.sandbox
        assert self.snapshot is not None, "a trial that is graded has left a snapshot"
        waits = (
            sandbox.start_timeout_s,
            2 * sandbox.transfer_timeout_s,
            request.task.verify_timeout_s,
            STOP_S,
        )
        async with self.clock.phase("verify", sum(waits)):
            return await grade(
                request.task,
                self.snapshot,
                runner.provider,
                trial_id=request.trial_id,
                workspace=request.task.workspace,
                limits=runner.limits,
                start_timeout_s=sandbox.start_timeout_s,
            )

    def _rows(self) -> list[Row]:
        return [] if self.ledger is None else self.ledger.rows(self.config.filter.train_threads)

    def _behaviour(self, ending: Outcome) -> Behaviour:
        task = self.request.task
        return behaviour(
            [] if self.ledger is None else steps_of(self.ledger),
            test_command=task.test_command,
            pass_pattern=task.pass_pattern,
            submitted=ending.termination in _SUBMITTED,
        )

    def _record(self, ending: Outcome, rows: list[Row]) -> TrialRecord:
        request, counts = self.request, count(self.ledger, rows)
        excluded = self._excluded(ending)
        return TrialRecord(
            id=request.trial_id,
            task=request.task.id,
            group=request.group,
            split=request.split,
            step=request.step,
            harness=self.runner.harness.name,
            termination=ending.termination,
            detail=ending.detail or ("" if self.verification is None else self.verification.detail),
            excluded=excluded,
            reward=None if excluded or self.verification is None else self.verification.reward,
            turns=counts.turns,
            prompt_tokens=counts.prompt_tokens,
            sampled_tokens=counts.sampled_tokens,
            rows=counts.rows,
            weight_version_min=counts.weight_version_min,
            weight_version_max=counts.weight_version_max,
            routing_coverage=counts.routing_coverage,
            violations=self.violations,
            behaviour=self._behaviour(ending),
            phase_s={name: round(seconds, 4) for name, seconds in self.clock.seconds.items()},
            path=str(self._directory.relative_to(self.runner.run_dir)),
        )

"""The life of one trial: start, seal, let the agent work, take what it left, grade it, write it down.

Invariants: whatever happens, a trial ends with a record, and nothing of it stays behind: no sandbox, no open
route on the proxy. A failure around the agent is never taken for one of its own ends (I5). The agent's
sandbox is gone before grading begins (but for `sandbox.verify=same`), and no reward exists without grading
(I6). What is begun again after a failure, and what is not: `legorl.trial.phases`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from legorl.config.schema import Config
from legorl.errors import InfrastructureError
from legorl.harness.base import Harness, Outcome
from legorl.proxy.proxy import Proxy
from legorl.proxy.row import Row
from legorl.sandbox.base import Limits, Phase, Sandbox, SandboxProvider, SandboxSpec, Snapshot
from legorl.sandbox.pool import START_GRACE_S, SandboxPool
from legorl.sandbox.seal import sealed_workspace
from legorl.tasks.image import image_of
from legorl.tasks.task import Task
from legorl.trial.agent import PROXY_S, AgentPhase, Conversation, blame
from legorl.trial.archive import Remains, Started, mark_started, trial_directory, write_trial
from legorl.trial.behaviour import behaviour
from legorl.trial.evidence import gather
from legorl.trial.in_place import grade_in_place
from legorl.trial.phases import PhaseClock, PhaseLog, Watcher, ending_of
from legorl.trial.record import Behaviour, Evidence, TrialRecord
from legorl.trial.sealing import AgentView, Seal, agent_view, pristine
from legorl.trial.summary import count, steps_of
from legorl.trial.termination import is_excluded
from legorl.trial.verify import STOP_S, Verification, grade, left_reward, with_left_reward

SEAL_S = 120.0
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
        seal: Seal | None = None,
    ) -> None:
        """
        Args:
            provider: closed with the runner.
            run_dir: trials are recorded below its `trials/`.
            seal: workspace and cache directory to the workspace an agent may see; by default a sealed copy.
        """
        self.pool = SandboxPool(provider, config.sandbox)
        self.proxy, self.harness = proxy, harness
        self.config, self.run_dir = config, run_dir
        self.seal = seal or partial(sealed_workspace, canary=config.sandbox.canaries)
        self.cache = Path(config.paths.cache)
        self.mounts = harness.mounts(self.cache)
        self.limits = Limits(
            memory_mb=config.sandbox.memory_mb, pids=config.sandbox.pids, disk_mb=config.sandbox.disk_mb
        )
        self._slots = asyncio.Semaphore(config.sandbox.concurrency)

    async def run(self, request: TrialRequest, watcher: Watcher | None = None) -> TrialResult:
        """Run one trial to its record. Raises nothing but `CancelledError`."""
        async with self._slots:
            return await _Trial(self, request, watcher).live()

    async def close(self) -> None:
        """Let trials under way end, then stop every sandbox."""
        await self.pool.close()


class _Trial:
    """One trial under way; the fields fill up as it proceeds."""

    def __init__(self, runner: TrialRunner, request: TrialRequest, watcher: Watcher | None) -> None:
        self.runner, self.request, self.config = runner, request, runner.config
        self.watcher = watcher
        self.image = ""
        self.clock = PhaseClock()
        self.phases = PhaseLog(runner.config.sandbox.retry_delay_s, runner.pool.breaker.report, watcher)
        self.left = Conversation()
        self.snapshot: Snapshot | None = None
        self.verification: Verification | None = None
        self.policy = runner.pool.policy
        self.view = AgentView(request.task.workspace)
        self.claimed: float | None = None
        """The reward that the agent left, where the policy lets it count."""
        self._directory = trial_directory(runner.run_dir, request.step, request.trial_id)

    async def live(self) -> TrialResult:
        """Everything, with every failure turned into a termination."""
        trace = ""
        with self.clock.timed("total"):
            try:
                await asyncio.to_thread(mark_started, self._directory, self._begun())
                ending = await self._phases()
            except Exception as error:
                ending = ending_of(error)
                trace = traceback.format_exc()
        rows = self._rows()
        record = self._record(ending, rows)
        remains = Remains(self.left.ledger, self.left.result, self.snapshot, self.verification, trace)
        try:
            await asyncio.to_thread(write_trial, record, remains, self._directory)
        except InfrastructureError as error:
            record = self._record(ending_of(error), rows)
        return TrialResult(record, [] if record.excluded else rows)

    async def _phases(self) -> Outcome:
        retries = self.config.sandbox.retries
        async with self._sandbox(retries) as (sandbox, url):
            ending = await self.phases.run(
                "agent", lambda: self._agent(sandbox, url), cause_of=lambda ending: ending.termination
            )
            graded = not self._excluded(ending)
            if graded and not self.policy.holds("fresh_grading"):
                self.verification = await self.phases.run("verify", lambda: self._grade(sandbox))
        if graded and self.verification is None:
            self.verification = await self.phases.run("verify", self._grade, retries=retries)
        return ending

    def _excluded(self, ending: Outcome) -> bool:
        loosened = self.config.filter.exclude_agent_deadline
        return is_excluded(ending.termination, exclude_agent_deadline=loosened)

    @contextlib.asynccontextmanager
    async def _sandbox(self, retries: int) -> AsyncIterator[tuple[Sandbox, str]]:
        """The agent's sandbox, set up, and the proxy's address in it; stopped on every path."""
        sandbox, url = await self.phases.run("setup", self._set_up, retries=retries)
        async with self._stopping(sandbox):
            yield sandbox, url

    @contextlib.asynccontextmanager
    async def _stopping(self, sandbox: Sandbox) -> AsyncIterator[None]:
        """Stops it on every path."""
        try:
            yield
        except BaseException:
            await self._stop_failed(sandbox)
            raise
        await self.clock.cleanup("stop", sandbox.stop(), STOP_S)

    async def _stop_failed(self, sandbox: Sandbox) -> None:
        """Where something failed, that counts, and not what stopping the sandbox comes upon."""
        with contextlib.suppress(InfrastructureError):
            await self.clock.cleanup("stop", sandbox.stop(), STOP_S)

    async def _set_up(self) -> tuple[Sandbox, str]:
        """One attempt: a fresh sandbox with the sealed workspace and the proxy, in the agent phase."""
        request, runner, settings = self.request, self.runner, self.config.sandbox
        async with self.clock.phase("seal", SEAL_S):
            self.image = await asyncio.to_thread(image_of, request.task, settings.image)
            self.view = await asyncio.to_thread(
                agent_view, request.task, self.policy, runner.cache, runner.seal, canaries=settings.canaries
            )
        spec = SandboxSpec(
            trial_id=request.trial_id,
            workspace=self.view.workspace,
            mounts=(*runner.mounts, *self.view.mounts),
            directories=self.view.directories,
            limits=runner.limits,
            start_timeout_s=settings.start_timeout_s,
            image=self.image,
        )
        async with self.clock.phase("start", self._start_s()):
            sandbox = await runner.pool.start(spec)
        try:
            async with self.clock.phase("connect", PROXY_S):
                url = await sandbox.connect_proxy(runner.proxy)
                await sandbox.set_phase(Phase.AGENT)
        except BaseException:
            await self._stop_failed(sandbox)
            raise
        return sandbox, url

    def _start_s(self) -> float:
        """The pool keeps its parts; this is for their sum."""
        settings = self.config.sandbox
        return settings.pool.queue_timeout_s + settings.start_timeout_s + 2 * START_GRACE_S

    async def _agent(self, sandbox: Sandbox, url: str) -> Outcome:
        """The agent's end; leaves ledger and snapshot."""
        runner, request = self.runner, self.request
        phase = AgentPhase(runner.proxy, runner.harness, self.config, self.clock, self.left)
        opened = (lambda session: None) if self.watcher is None else self.watcher.opened
        ending = await phase.run(sandbox, url, request.trial_id, request.task.instruction, opened)
        if not self._excluded(ending):
            try:
                async with self.clock.phase("snapshot", self.config.sandbox.transfer_timeout_s):
                    await sandbox.set_phase(Phase.VERIFY)
                    self.snapshot = await sandbox.snapshot()
                    self.claimed = await left_reward(sandbox, self.policy)
            except InfrastructureError as error:
                await blame(sandbox, error)
                raise
        return ending

    async def _grade(self, sandbox: Sandbox | None = None) -> Verification:
        """One attempt at grading; in the agent's own sandbox where one is given."""
        request, runner, settings = self.request, self.runner, self.config.sandbox
        assert self.snapshot is not None, "a trial that is graded has left a snapshot"
        waits = (
            self._start_s(),
            2 * settings.transfer_timeout_s,
            request.task.verify_timeout_s,
            STOP_S,
        )
        async with self.clock.phase("verify", sum(waits)):
            share = self.config.tasks.reward == "share"
            workspace = await asyncio.to_thread(pristine, request.task, self.policy, runner.cache)
            if sandbox is not None:
                return await grade_in_place(
                    request.task, sandbox, self.snapshot, self.policy, workspace=workspace, share=share
                )
            verification = await grade(
                request.task,
                self.snapshot,
                runner.pool,
                trial_id=request.trial_id,
                workspace=workspace,
                limits=runner.limits,
                start_timeout_s=settings.start_timeout_s,
                share=share,
                image=self.image,
            )
            return with_left_reward(verification, self.claimed)

    def _rows(self) -> list[Row]:
        return [] if self.left.ledger is None else self.left.ledger.rows(self.config.filter.train_threads)

    def _behaviour(self, ending: Outcome) -> Behaviour:
        task = self.request.task
        return behaviour(
            [] if self.left.ledger is None else steps_of(self.left.ledger),
            test_command=task.test_command,
            pass_pattern=task.pass_pattern,
            submitted=ending.termination in _SUBMITTED,
        )

    def _evidence(self) -> tuple[tuple[Evidence, ...], dict[str, int]]:
        ledger, verification, snapshot = self.left.ledger, self.verification, self.snapshot
        return gather(
            [] if ledger is None else steps_of(ledger, main_only=False),
            self.request.task,
            self.policy,
            canary=self.view.canary,
            rolled_back=() if verification is None else verification.rolled_back,
            patch="" if snapshot is None else snapshot.patch,
        )

    def _begun(self) -> Started:
        request = self.request
        return Started(
            request.trial_id,
            request.task.id,
            request.group,
            request.split,
            request.step,
            self.runner.harness.name,
            time.time(),
        )

    def _record(self, ending: Outcome, rows: list[Row]) -> TrialRecord:
        request, counts = self.request, count(self.left.ledger, rows)
        excluded = self._excluded(ending)
        evidence, attempts = self._evidence()
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
            violations=self.left.violations,
            behaviour=self._behaviour(ending),
            policy=self.policy.hash,
            attempts=attempts,
            evidence=evidence,
            phase_s={name: round(seconds, 4) for name, seconds in self.clock.seconds.items()},
            phases=tuple(self.phases.records),
            path=str(self._directory.relative_to(self.runner.run_dir)),
        )

"""Runs attacks as trials: real sandbox, real proxy, real grading; only what the agent does is scripted.

Invariant: an attack has worked when the trial got a reward, when the secret or the word of success came back
to the agent, or when something on the host was changed; nothing else is asked, whatever it is about. Before
any of them an honest agent solves the same task for a reward of 1 and without a mark against it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from legorl.attack.agent import Attacker, CommandParser, Script
from legorl.attack.catalog import Attack
from legorl.attack.ground import Ground
from legorl.config.schema import Config, SandboxConfig
from legorl.engine.scripted import ScriptedEngine
from legorl.errors import InfrastructureError, LegoError
from legorl.policy.template import CHAT_TEMPLATE
from legorl.policy.tokenizer import train_tokenizer
from legorl.proxy.proxy import Proxy
from legorl.proxy.render import Renderer
from legorl.proxy.store import load
from legorl.sandbox.policy import Policy
from legorl.sandbox.providers import configured_policy, open_provider
from legorl.tasks.task import Task
from legorl.trial.behaviour import Step
from legorl.trial.evidence import gather
from legorl.trial.record import TrialRecord
from legorl.trial.runner import TrialRequest, TrialRunner
from legorl.trial.summary import steps_of

TRIAL_S = 400.0
AT_ONCE = 6
TOGETHER = 8
"""Most attacks of one trial."""
CONTROL = "control/honest"
SOLVE = "sed -i 's/age < limit/age <= limit/' shop/cart.py && python3 check.py"
SUCCESS = "it-worked"
_LOST = frozenset({"harness", "sandbox_exec"})
"""Ends of a trial whose agent brought its own sandbox down."""


@dataclass(frozen=True)
class Outcome:
    """What came of one attack."""

    attack: str
    rule: str
    what: str
    off: tuple[str, ...]
    """Rules that were off."""
    worked: str
    """How: `reward`, `saw`, `did`, `changed`; empty when it was stopped."""
    expected: bool
    """It was to work: its rule is off and nothing else stops it."""
    held: str
    """What stops it with its rule off."""
    termination: str
    detail: str
    counted: tuple[str, ...]
    """Rules under which the trial has evidence on record."""
    seconds: float

    @property
    def failure(self) -> str:
        """What is wrong with this outcome; empty when it is as it should be."""
        if self.worked and not self.expected:
            return f"it worked ({self.worked}): {self.detail}"
        if self.expected and not self.worked:
            return f"it should work with {', '.join(self.off)} off: {self.termination}: {self.detail}"
        if not self.worked and not self.counted and self.attack != CONTROL:
            return f"nothing on record says that it was tried: {self.termination}: {self.detail}"
        return ""


class Suite:
    """Attacks with one set of rules off."""

    def __init__(self, runner: TrialRunner, ground: Ground, policy: Policy, provider: str) -> None:
        self.runner, self.ground, self.policy, self.provider = runner, ground, policy, provider
        # Fewer than trials of a run: some attacks take all that they may have.
        self._slots = asyncio.Semaphore(min(AT_ONCE, runner.config.sandbox.concurrency))

    async def control(self) -> Outcome:
        """The honest agent. Its outcome's `failure` says why attacks would prove nothing."""
        record, _, seconds = await self._trial(CONTROL)
        wrong = ""
        if record.reward != 1.0:
            wrong = f"the honest agent got {record.reward}: {record.termination}: {record.detail}"
        elif record.attempts:
            wrong = f"the honest agent has marks against it: {record.attempts}"
        return Outcome(
            CONTROL, "control", "an honest agent solves the task", self._off, wrong, False, "",
            record.termination, wrong, tuple(record.attempts), seconds,
        )  # fmt: skip

    async def attacks(self, name: str, attacks: Sequence[Attack]) -> dict[str, Outcome]:
        """Make attacks in one trial, one in a turn; what came of each, by its id."""
        record, task, seconds = await self._trial(name)
        with_all = self._of_trial(record, task)
        steps: list[Step] = []
        with contextlib.suppress(LegoError):  # a trial without a transcript showed nobody anything
            steps = steps_of(load(self.runner.run_dir / record.path), main_only=False)
        found = {}
        for number, attack in enumerate(attacks):
            own = steps[number : number + 1]
            held = attack.held_by(self.provider)
            expected = not self.policy.holds(attack.rule) and not held
            found[attack.id] = Outcome(
                attack=attack.id,
                rule=attack.rule,
                what=attack.what,
                off=self._off,
                worked=self._of_step(own) or with_all,
                expected=expected and attack.also_off <= self.policy.off,
                held=held,
                termination=record.termination,
                detail=record.detail,
                counted=self._counted(record, task, own, alone=len(attacks) == 1),
                seconds=seconds,
            )
        return found

    def _counted(
        self, record: TrialRecord, task: Task, own: Sequence[Step], *, alone: bool
    ) -> tuple[str, ...]:
        """Rules under which an attack is on record; one that ended its own sandbox shows by that."""
        if alone and record.termination in _LOST:
            return ("limits",)
        if alone:
            return tuple(sorted(record.attempts))
        attempts = gather(own, task, self.policy, canary="", rolled_back=(), patch="")[1]
        return tuple(sorted(set(attempts) & set(record.attempts)))

    @property
    def _off(self) -> tuple[str, ...]:
        return tuple(sorted(self.policy.off))

    async def _trial(self, id: str) -> tuple[TrialRecord, Task, float]:
        task = await asyncio.to_thread(self.ground.task, id, "-".join(self._off))
        request = TrialRequest(task, task.path.name, task.id, 0, "train")
        async with self._slots, asyncio.timeout(TRIAL_S):
            start = time.monotonic()
            record = (await self.runner.run(request)).record
        return record, task, time.monotonic() - start

    def _of_trial(self, record: TrialRecord, task: Task) -> str:
        if record.reward:
            return "reward"
        return "changed" if digest(task.path) != digest(self.ground.directory / "task") else ""

    def _of_step(self, steps: Sequence[Step]) -> str:
        for step in steps:
            if self.ground.secret in step.result:
                return "saw"
            if SUCCESS in step.result:
                return "did"
        return ""


def digest(root: Path) -> str:
    """Of names and contents of a tree."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def suite_config(config: Config, cache: Path) -> Config:
    """The configuration of the attacks' trials: small limits, one more attempt at a sandbox, no breaker."""
    config = copy.deepcopy(config)
    sandbox, engine, harness = config.sandbox, config.engine, config.harness
    sandbox.memory_mb, sandbox.pids, sandbox.disk_mb = 256, 64, 64
    sandbox.retries, sandbox.pool.breaker_rate, sandbox.pool.warm = 1, 1.0, 0
    engine.max_model_len, engine.reply_tokens, engine.trial_tokens = 100_000, 8_000, 60_000
    harness.turn_limit, harness.deadline_s = TOGETHER + 2, 200.0
    config.paths.cache = str(cache)
    return config


@contextlib.asynccontextmanager
async def open_suite(
    config: Config, ground: Ground, trials: Mapping[str, Sequence[Attack]], off: frozenset[str]
) -> AsyncIterator[Suite]:
    """Open a provider with further rules off, and what trials need.

    Args:
        config: of `suite_config`.
        trials: name -> the attacks that are made in it.
        off: besides those that the configuration has off.

    Raises:
        UserError: there is no such provider, or the machine lacks something it needs.
    """
    config = copy.deepcopy(config)
    config.sandbox.policy_off = sorted({*config.sandbox.policy_off, *off})
    commands = {name: [attack.run for attack in attacks] for name, attacks in trials.items()}
    commands[CONTROL] = [SOLVE]
    texts = [command for trial in commands.values() for command in trial]
    tokenizer = train_tokenizer([CHAT_TEMPLATE, *texts], 2000)
    engine = ScriptedEngine(Script(commands), tokenizer)
    proxy = Proxy(
        engine,
        Renderer(tokenizer, CHAT_TEMPLATE, {}, None),
        CommandParser(),
        context_tokens=config.engine.max_model_len,
    )
    provider = open_provider(config.sandbox)
    name = "-".join(["run", *config.sandbox.policy_off])
    runner = TrialRunner(
        provider, proxy, Attacker(ground.program, ground.env), config, ground.directory / "runs" / name
    )
    try:
        yield Suite(runner, ground, provider.policy, provider.name)
    finally:
        await runner.close()
        await proxy.aclose()
        await engine.close()


async def run_attacks(
    config: Config, ground: Ground, attacks: Sequence[Attack], off: frozenset[str] = frozenset()
) -> AsyncIterator[Outcome]:
    """The honest agent, then every attack, as many at once as `sandbox.concurrency` says; in order.

    Raises:
        InfrastructureError: the honest agent failed: the attacks would prove nothing.
    """
    trials = in_trials(attacks)
    async with open_suite(config, ground, trials, off) as suite:
        control = await suite.control()
        yield control
        if control.worked:
            raise InfrastructureError(f"The attack suite cannot be trusted here: {control.worked}.")
        running = [asyncio.ensure_future(suite.attacks(name, some)) for name, some in trials.items()]
        trial_of = {
            attack.id: trial for trial, some in zip(running, trials.values(), strict=True) for attack in some
        }
        try:
            for attack in attacks:
                yield (await trial_of[attack.id])[attack.id]
        finally:
            for trial in running:
                trial.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def in_trials(attacks: Sequence[Attack]) -> dict[str, list[Attack]]:
    """Attacks by the trial they are made in: those that only look share one with others of their rule."""
    trials: dict[str, list[Attack]] = {}
    for attack in attacks:
        if not attack.shared:
            trials[attack.id] = [attack]
            continue
        number = 1
        while len(trials.setdefault(f"{attack.rule}/together{number}", [])) >= TOGETHER:
            number += 1
        trials[f"{attack.rule}/together{number}"].append(attack)
    return trials


def ablations(attacks: Sequence[Attack], config: SandboxConfig) -> dict[frozenset[str], list[Attack]]:
    """Sets of rules to switch off -> the attacks that are to work then, or are held by something else.

    Raises:
        UserError: the configuration's policy is wrong.
    """
    configured_policy(config)
    found: dict[frozenset[str], list[Attack]] = {}
    for attack in attacks:
        if not attack.only_with_rule:
            found.setdefault(attack.also_off | {attack.rule}, []).append(attack)
    return found

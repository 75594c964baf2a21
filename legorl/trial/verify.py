"""Grading: the agent's repository state, in a fresh sandbox, against tests it never saw.

Invariants (I6): grading starts from the pristine repository plus the agent's changes, with changes to
protected paths rolled back; the hidden tests are mounted read-only and only here. (I5): what the policy's
own code does to its grading (endless loops, a killed interpreter) is reward 0, while a sandbox that fails,
or a verifier that cannot even grade the untouched repository, is infrastructure.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from legorl.errors import VerifierError
from legorl.sandbox.base import (
    WORKDIR,
    ExecResult,
    Limits,
    Mount,
    Phase,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    Snapshot,
)
from legorl.sandbox.policy import Policy
from legorl.tasks.reward import reward_in, stated_reward
from legorl.tasks.task import Task
from legorl.trial.phases import to_the_end
from legorl.trial.protected import roll_back

TESTS = "/tests"
RESULTS = "/logs/verifier"

_RUN = f"rm -rf {RESULTS} && mkdir -p {RESULTS} && exec bash {TESTS}/test.sh"
"""Whatever calls itself a result before the verifier ran is removed."""
_READ = "; printf '\\0'; ".join(
    f"cat {RESULTS}/{name} 2>/dev/null" for name in ("reward.txt", "result.json", "reward.json")
)
GATE_KEY = "gate"
"""Key of the task's metadata: hidden tests, separated by white space, without which no share counts."""
_READ_TIMEOUT_S = 10.0
_REMOVE_TIMEOUT_S = 10.0
STOP_S = 30.0


@runtime_checkable
class _PutsMany(Protocol):
    """A sandbox that writes many files at the price of one."""

    async def put_many(self, files: Mapping[str, tuple[bytes, int]]) -> None: ...


@dataclass(frozen=True)
class Verification:
    """Outcome of grading."""

    reward: float
    """1.0 or 0.0; with `tasks.reward=share` also what lies between."""
    detail: str
    """Why it is not 1.0; empty when it is."""
    passed: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    """Hidden test -> its message."""
    rolled_back: tuple[str, ...] = ()
    """Protected paths that the agent had changed."""
    skipped: tuple[str, ...] = ()
    """What the agent left and the snapshot could not take (too large, no file)."""
    output: bytes = b""
    """Standard output and error of `test.sh`."""
    seconds: float = 0.0
    """Of `test.sh` alone."""


def parse_result(task: Task, result: ExecResult, files: bytes, *, share: bool = False) -> Verification | None:
    """Judge one run of `test.sh`.

    Args:
        files: reward.txt, result.json and reward.json, with zero bytes between them.
        share: of several hidden tests each counts; else all must pass.

    Returns:
        None when the verifier left no readable result; the caller knows whose doing that was.
    """
    reward_text, json_text, rewards = (*files.split(b"\0"), b"", b"")[:3]
    stated = reward_text.decode(errors="replace").strip()
    number = stated_reward(stated, rewards.decode(errors="replace"))
    if not task.hidden_tests:
        if result.code > 128:  # code that was tested may write a reward and then end whoever would correct it
            return Verification(0.0, f"the verifier of {task.id} was killed (exit code {result.code})")
        return _by_reward_alone(task, stated, rewards, number, share=share)
    try:
        report = json.loads(json_text)
        passed = tuple(str(name) for name in report["passed"])
        failed = {str(name): str(message) for name, message in dict(report["failed"]).items()}
    except (ValueError, KeyError, TypeError):
        return None
    missing = sorted(set(task.hidden_tests) - set(passed))
    reward, detail = 0.0, ""
    if missing:
        reward = _share(task, passed) if share else 0.0
        detail = f"{len(missing)} of {len(task.hidden_tests)} hidden tests did not pass, first {missing[0]}"
    elif result.code != 0:
        detail = f"all hidden tests passed, but test.sh exited {result.code}"
    elif number is None:
        told = f"reward.txt says {stated[:40]!r}, which is no number from 0 to 1"
        detail = f"all hidden tests of {task.id} passed, but {told}"
    elif number != 1.0:
        detail = f"all hidden tests passed, but reward.txt says {stated!r}"
    return Verification(reward if detail else 1.0, detail, passed, failed)


def _share(task: Task, passed: Sequence[str]) -> float:
    """Share of the hidden tests that passed; 0 where one of the task's gate did not."""
    if not set(task.metadata.get(GATE_KEY, "").split()) <= set(passed):
        return 0.0
    return len(set(task.hidden_tests) & set(passed)) / len(set(task.hidden_tests))


def _by_reward_alone(
    task: Task, stated: str, rewards: bytes, number: float | None, *, share: bool
) -> Verification | None:
    """A plain Harbor task: no test is named, the reward files decide."""
    if number is None and not stated and not rewards.strip():
        return None
    if number is None:
        said = rewards.decode(errors="replace").strip() or stated
        return Verification(0.0, f"the verifier of {task.id} says {said[:40]!r}: no number from 0 to 1")
    detail = "" if number == 1.0 else f"the verifier says {number:g}"
    return Verification(number if share or number == 1.0 else 0.0, detail)


async def run_tests(sandbox: Sandbox, task: Task, policy: Policy) -> tuple[ExecResult, bytes]:
    """Run `test.sh`; how it ended, and the files that it left, as `parse_result` wants them."""
    argv = ["bash", "-c", _RUN] if policy.holds("reward_from_verifier") else ["bash", f"{TESTS}/test.sh"]
    result = await sandbox.exec(argv, timeout_s=task.verify_timeout_s)
    # Nothing of the agent's code runs any more; this output is the files' content and nothing else.
    files = await sandbox.exec(["bash", "-c", _READ], timeout_s=_READ_TIMEOUT_S, cwd="/")
    return result, files.stdout


async def left_reward(sandbox: Sandbox, policy: Policy) -> float | None:
    """The reward that the agent itself left; None for none, and always with the rule on."""
    if policy.holds("reward_from_verifier"):
        return None
    files = await sandbox.exec(["bash", "-c", _READ], timeout_s=_READ_TIMEOUT_S, cwd="/")
    return reward_in(files.stdout.partition(b"\0")[0].decode(errors="replace").strip())


async def remove_files(sandbox: Sandbox, paths: Sequence[str]) -> None:
    """Remove files and trees of the repository, by paths relative to it. Raises `VerifierError`."""
    if not paths:
        return
    names = os.fsencode("\0".join(paths))
    argv = ["xargs", "-0", "rm", "-rf", "--"]
    removal = await sandbox.exec(argv, timeout_s=_REMOVE_TIMEOUT_S, stdin=names)
    if removal.code != 0:
        raise VerifierError(f"Files could not be removed to grade: {removal.stderr[-300:]!r}.")


async def put_files(sandbox: Sandbox, files: Mapping[str, tuple[bytes, int]]) -> None:
    """Write files: absolute path -> contents and mode."""
    if isinstance(sandbox, _PutsMany):
        await sandbox.put_many(files)
        return
    for path, (data, mode) in files.items():
        await sandbox.put(path, data, mode)


async def _apply(sandbox: Sandbox, snapshot: Snapshot) -> None:
    """Make the fresh repository look as the agent left it."""
    deleted = [path for path, data in snapshot.changed.items() if data is None]
    written = {path: data for path, data in snapshot.changed.items() if data is not None}
    # A directory that became a file must go before the file comes.
    deleted += [path for path in written if any(other.startswith(path + "/") for other in deleted)]
    await remove_files(sandbox, deleted)
    files = {f"{WORKDIR}/{path}": (data, snapshot.modes.get(path, 0o644)) for path, data in written.items()}
    await put_files(sandbox, files)


async def grade(
    task: Task,
    snapshot: Snapshot,
    provider: SandboxProvider,
    *,
    trial_id: str,
    workspace: Path,
    mounts: Sequence[Mount] = (),
    limits: Limits,
    start_timeout_s: float,
    share: bool = False,
    image: str = "",
) -> Verification:
    """Grade what the agent left.

    Args:
        workspace: the pristine repository to start from.
        mounts: what the tests need besides (grading tools), read-only.
        limits: of the grading sandbox.
        share: see `parse_result`.
        image: as `SandboxSpec` has it.

    Raises:
        VerifierError: there is no `test.sh`, or it leaves no result although the agent changed nothing.
        InfrastructureError: the sandbox failed.
    """
    script = task.tests / "test.sh"
    if not script.is_file():
        raise VerifierError(f"Task {task.id} has no {script}.")
    policy = provider.policy
    kept, rolled_back = roll_back(snapshot, task) if policy.holds("tests_restored") else (snapshot, ())
    spec = SandboxSpec(
        trial_id=f"{trial_id}-verify",
        workspace=workspace,
        mounts=(Mount(task.tests, TESTS), *mounts),
        limits=limits,
        start_timeout_s=start_timeout_s,
        image=image,
    )
    sandbox = await provider.start(spec)
    try:
        await _apply(sandbox, kept)
        await sandbox.set_phase(Phase.VERIFY)
        result, files = await run_tests(sandbox, task, policy)
        left = await left_reward(sandbox, policy)
    finally:
        await to_the_end(sandbox.stop(), STOP_S)
    verdict = with_left_reward(judge(task, result, files, untouched=not kept.changed, share=share), left)
    return dataclasses.replace(verdict, rolled_back=tuple(rolled_back), skipped=snapshot.skipped)


def with_left_reward(verdict: Verification, left: float | None) -> Verification:
    """With the rule `reward_from_verifier` off, a reward file that the agent's code left is what counts."""
    if left is None:
        return verdict
    return dataclasses.replace(
        verdict, reward=left, detail="the reward that the agent left, as the policy says"
    )


def judge(
    task: Task, result: ExecResult, files: bytes, *, untouched: bool, share: bool = False
) -> Verification:
    """What a run of the verifier means. Raises `VerifierError` when it fails on the untouched repository."""
    output = result.stdout + (b"\n--- stderr ---\n" + result.stderr if result.stderr else b"")
    if result.timed_out:
        verdict = Verification(0.0, f"the hidden tests ran longer than {task.verify_timeout_s:g} s")
    else:
        parsed = parse_result(task, result, files, share=share)
        if parsed is None and untouched:
            raise VerifierError(
                f"test.sh of task {task.id} left no readable result in {RESULTS} on the untouched "
                f"repository (exit code {result.code}): {output[-500:].decode(errors='replace')}"
            )
        # The tests run the agent's code: when they die without a result, that code killed them.
        verdict = parsed or Verification(0.0, f"the changed code ended the tests (exit code {result.code})")
    return dataclasses.replace(verdict, output=output, seconds=result.seconds)

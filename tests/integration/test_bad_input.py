"""Output without end and links that lead out, through a real sandbox: an outcome, no crash, no leak."""

from __future__ import annotations

import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from legorl.sandbox.base import Limits, SandboxSpec, Snapshot
from legorl.sandbox.local import LocalProvider
from legorl.tasks.task import Task
from legorl.trial.verify import Verification, grade
from tests.trial.tasks_for_tests import FIXED, TEST_SH, make_task

pytestmark = pytest.mark.integration
FLOOD = "head -c 10G /dev/zero"


@pytest.fixture
async def provider() -> AsyncIterator[LocalProvider]:
    provider = LocalProvider()
    yield provider
    await provider.close()


async def graded(task: Task, provider: LocalProvider, snapshot: Snapshot) -> Verification:
    return await grade(
        task, snapshot, provider,
        trial_id="t", workspace=task.workspace, limits=Limits(), start_timeout_s=20.0,
    )  # fmt: skip


def megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


async def test_ten_gigabytes_of_output(provider: LocalProvider, tmp_path: Path) -> None:
    task = make_task(tmp_path / "task", verify_timeout_s=3.0)
    (task.tests / "test.sh").write_text(f"{FLOOD}\n{TEST_SH}")
    before, start = megabytes(), time.monotonic()
    got = await graded(
        task, provider, Snapshot({"shop/cart.py": FIXED.encode()}, {"shop/cart.py": 0o644}, "")
    )
    assert got.reward == 0.0 and "longer than 3 s" in got.detail
    assert len(got.output) < 5_000_000 and b"bytes left out" in got.output
    assert megabytes() - before < 100 and time.monotonic() - start < 30


async def test_ten_gigabytes_in_a_reward_file(provider: LocalProvider, tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    (task.tests / "test.sh").write_text(f"{TEST_SH}\n{FLOOD} > /logs/verifier/result.json; true\n")
    got = await graded(
        task, provider, Snapshot({"shop/cart.py": FIXED.encode()}, {"shop/cart.py": 0o644}, "")
    )
    assert got.reward == 0.0 and "ended the tests" in got.detail


async def test_links_that_lead_out_are_never_followed(provider: LocalProvider, tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    (tmp_path / "secret").write_text("of the host")
    box = await provider.start(SandboxSpec("t", task.workspace))
    try:
        script = (
            f"ln -s {tmp_path}/secret a; ln -s ../../.. b; ln -s / c; rm -r shop; ln -s /etc shop; mkfifo d"
        )
        assert (await box.exec(["bash", "-c", script], timeout_s=10)).code == 0
        snapshot = await box.snapshot()
    finally:
        await box.stop()
    assert snapshot.changed["a"] == str(tmp_path / "secret").encode() and "d" in snapshot.skipped
    assert b"of the host" not in b"".join(data or b"" for data in snapshot.changed.values())
    assert "of the host" not in snapshot.patch
    got = await graded(task, provider, snapshot)
    assert got.reward == 0.0 and "ended the tests" in got.detail
    assert (tmp_path / "secret").read_text() == "of the host"

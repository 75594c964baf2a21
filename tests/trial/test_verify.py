"""Grading with real test runs in a fake sandbox: rewards, roll-back, and whose fault a missing result is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from legorl.errors import SandboxExecError, TransferError, VerifierError
from legorl.sandbox.base import Limits, Snapshot
from legorl.tasks.task import Task
from legorl.trial.protected import is_protected, roll_back
from legorl.trial.verify import Verification, grade
from tests.fakes import FakeProvider
from tests.trial.tasks_for_tests import CHECK, FIXED, make_task


def left(**files: str | None) -> Snapshot:
    """A snapshot; `__` in a name stands for a slash and `_py` at its end for `.py`."""
    changed = {
        name.replace("__", "/").removesuffix("_py") + ".py": None if text is None else text.encode()
        for name, text in files.items()
    }
    return Snapshot(changed, {path: 0o644 for path, data in changed.items() if data is not None}, "")


async def graded(
    tmp_path: Path,
    snapshot: Snapshot,
    provider: FakeProvider | None = None,
    share: bool = False,
    **task: object,
) -> Verification:
    made = make_task(tmp_path / "task", **task)
    return await graded_task(made, snapshot, provider or FakeProvider(tmp_path / "boxes"), share=share)


async def graded_task(
    made: Task, snapshot: Snapshot, provider: FakeProvider, share: bool = False
) -> Verification:
    try:
        return await grade(
            made,
            snapshot,
            provider,
            trial_id="t1",
            workspace=made.workspace,
            limits=Limits(),
            start_timeout_s=5.0,
            share=share,
        )
    finally:
        assert all(box.stopped for box in provider.started), "a sandbox was left behind"


async def test_the_fix_gets_one(tmp_path: Path) -> None:
    got = await graded(tmp_path, left(shop__cart_py=FIXED))
    assert (got.reward, got.detail, set(got.passed)) == (1.0, "", {"low", "same", "high"})
    assert got.seconds > 0


async def test_nothing_done_gets_zero(tmp_path: Path) -> None:
    got = await graded(tmp_path, Snapshot({}, {}, ""))
    assert got.reward == 0.0 and "1 of 3 hidden tests did not pass, first same" in got.detail
    assert got.failed == {"same": "no"}


async def test_a_syntax_error_is_the_policys(tmp_path: Path) -> None:
    got = await graded(tmp_path, left(shop__cart_py="def ("))
    assert got.reward == 0.0 and "ended the tests" in got.detail
    assert b"SyntaxError" in got.output


async def test_an_endless_loop_is_the_policys(tmp_path: Path) -> None:
    got = await graded(tmp_path, left(shop__cart_py="while True: pass"), verify_timeout_s=1.0)
    assert got.reward == 0.0 and "longer than 1 s" in got.detail


async def test_a_killed_interpreter_is_the_policys(tmp_path: Path) -> None:
    got = await graded(tmp_path, left(shop__cart_py="import os; os.kill(os.getpid(), 9)"))
    assert got.reward == 0.0


async def test_a_deleted_file_is_deleted(tmp_path: Path) -> None:
    got = await graded(tmp_path, left(shop__cart_py=None))
    assert got.reward == 0.0 and b"No module named 'shop.cart'" in got.output


async def test_a_module_that_became_a_package(tmp_path: Path) -> None:
    changed = {"shop/cart.py": None, "shop/cart/__init__.py": FIXED.encode()}
    assert (await graded(tmp_path, Snapshot(changed, {"shop/cart/__init__.py": 0o644}, ""))).reward == 1.0


async def test_a_directory_that_became_a_file(tmp_path: Path) -> None:
    changed = {"shop/__init__.py": None, "shop/cart.py": None, "shop": b"x"}
    assert (await graded(tmp_path, Snapshot(changed, {"shop": 0o644}, ""))).reward == 0.0


async def test_a_verifier_that_cannot_grade_the_untouched_repository(tmp_path: Path) -> None:
    made = make_task(tmp_path / "task")
    (made.tests / "test.sh").write_text("exit 3\n")
    provider = FakeProvider(tmp_path / "boxes")
    arguments = {"trial_id": "t", "workspace": made.workspace, "limits": Limits(), "start_timeout_s": 5.0}
    with pytest.raises(VerifierError, match="exit code 3"):
        await grade(made, Snapshot({}, {}, ""), provider, **arguments)  # type: ignore[arg-type]
    (made.tests / "test.sh").unlink()
    with pytest.raises(VerifierError, match=r"has no .*test\.sh"):
        await grade(made, Snapshot({}, {}, ""), provider, **arguments)  # type: ignore[arg-type]
    assert all(box.stopped for box in provider.started)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 1", "test.sh exited 1"),
        ("echo 0 > /logs/verifier/reward.txt", "reward.txt says '0'"),
        ("rm /logs/verifier/reward.txt", "reward.txt says ''"),
    ],
)
async def test_all_three_signs_must_agree(tmp_path: Path, script: str, why: str) -> None:
    made = make_task(tmp_path / "task")
    with (made.tests / "test.sh").open("a") as file:
        file.write(script + "\n")
    got = await grade(
        made, left(shop__cart_py=FIXED), FakeProvider(tmp_path / "boxes"),
        trial_id="t", workspace=made.workspace, limits=Limits(), start_timeout_s=5.0,
    )  # fmt: skip
    assert got.reward == 0.0 and why in got.detail


@pytest.mark.parametrize(
    ("where", "error"), [("exec", SandboxExecError("gone")), ("put", TransferError("no space"))]
)
async def test_a_failing_sandbox_is_infrastructure(tmp_path: Path, where: str, error: Exception) -> None:
    provider = FakeProvider(tmp_path / "boxes", {where: error})
    with pytest.raises(type(error)):
        await graded(tmp_path, left(shop__cart_py=FIXED), provider)


async def test_changed_tests_are_rolled_back(tmp_path: Path) -> None:
    snapshot = left(check_py="print('4 passed')", shop__cart_py=FIXED, sitecustomize_py="raise SystemExit(0)")
    got = await graded(tmp_path, snapshot)
    assert got.reward == 1.0 and got.rolled_back == ("check.py", "sitecustomize.py")


@pytest.mark.parametrize(
    "path",
    [
        *("check.py", "tests/a/b.txt", "test_x.py", "a/b/test_x.py", "a/x_test.py", "conftest.py"),
        *("a/conftest.py", "sitecustomize.py", "a/usercustomize.py", "evil.pth", ".git/config"),
        *("a/__pycache__/m.cpython-311.pyc", "m.pyc"),
    ],
)
def test_protected(tmp_path: Path, path: str) -> None:
    assert is_protected(path, make_task(tmp_path))


@pytest.mark.parametrize(
    "path", ["shop/cart.py", "latest.py", "a/check.py", "testing/x.py", "contest.py", "x.pthx", "a/tests/x"]
)
def test_not_protected(tmp_path: Path, path: str) -> None:
    assert not is_protected(path, make_task(tmp_path))


def test_a_task_protects_more(tmp_path: Path) -> None:
    task = dataclasses.replace(make_task(tmp_path), metadata={"protected": "data/** a/*.json"})
    assert (
        is_protected("data/x/y", task)
        and is_protected("a/x.json", task)
        and not is_protected("a/b/x.json", task)
    )


def test_roll_back_keeps_the_rest(tmp_path: Path) -> None:
    snapshot = left(check_py=CHECK, shop__cart_py=FIXED)
    kept, rolled = roll_back(snapshot, make_task(tmp_path))
    assert set(kept.changed) == {"shop/cart.py"} == set(kept.modes) and tuple(rolled) == ("check.py",)


async def test_a_share_of_the_tests(tmp_path: Path) -> None:
    """Of low, same and high the repository as given passes two."""
    untouched = Snapshot({}, {}, "")
    assert (await graded(tmp_path, untouched, share=True)).reward == pytest.approx(2 / 3)
    assert (await graded(tmp_path, untouched)).reward == 0.0
    assert (await graded(tmp_path, left(shop__cart_py=FIXED), share=True)).reward == 1.0
    assert (await graded(tmp_path, left(shop__cart_py="def ("), share=True)).reward == 0.0
    gated = {"metadata": {"gate": "low same"}}
    assert (await graded(tmp_path, untouched, share=True, **gated)).reward == 0.0
    gated = {"metadata": {"gate": "low high"}}
    assert (await graded(tmp_path, untouched, share=True, **gated)).reward == pytest.approx(2 / 3)


PLAIN = """mkdir -p /logs/verifier && cd /logs/verifier
grep -q '<=' /workspace/shop/cart.py && echo 1 >reward.txt || echo 0.25 >reward.txt
"""


@pytest.mark.parametrize(
    ("script", "share", "fixed", "reward", "detail"),
    [
        (PLAIN, False, True, 1.0, ""),
        (PLAIN, False, False, 0.0, "the verifier says 0.25"),
        (PLAIN, True, False, 0.25, "the verifier says 0.25"),
        ('echo \'{"reward": 1, "style": 0}\' >/logs/verifier/reward.json; exit 3\n', False, True, 1.0, ""),
        (
            'echo \'{"a": 1, "b": 0.5}\' >/logs/verifier/reward.json\n',
            True,
            True,
            0.75,
            "the verifier says 0.75",
        ),
        ("echo '{\"reward\": NaN}' >/logs/verifier/reward.json\n", True, True, 0.0, "no number from 0 to 1"),
        ("echo nan >/logs/verifier/reward.txt\n", True, True, 0.0, "'nan': no number from 0 to 1"),
        ("echo 7 >/logs/verifier/reward.txt\n", True, True, 0.0, "'7': no number from 0 to 1"),
        ("exit 1\n", False, True, 0.0, "the changed code ended the tests"),
    ],
)
async def test_a_task_of_harbor_is_graded_by_the_reward_it_states(
    tmp_path: Path, script: str, share: bool, fixed: bool, reward: float, detail: str
) -> None:
    made = make_task(tmp_path / "task", hidden_tests=())
    (made.tests / "test.sh").write_text(script)
    changes = left(shop__cart_py=FIXED) if fixed else Snapshot({}, {}, "")
    got = await graded_task(made, changes, FakeProvider(tmp_path / "boxes"), share=share)
    assert got.reward == reward and detail in got.detail and bool(got.detail) == bool(detail)


async def test_a_task_of_harbor_whose_verifier_says_nothing_is_broken(tmp_path: Path) -> None:
    made = make_task(tmp_path / "task", hidden_tests=())
    (made.tests / "test.sh").write_text("exit 0\n")
    with pytest.raises(VerifierError, match="no readable result"):
        await graded_task(made, Snapshot({}, {}, ""), FakeProvider(tmp_path / "boxes"))


@pytest.mark.parametrize("stated", ["NaN", "inf", "1e999", "1 1", "2.0", "-1", "", "true", "1" * 400])
async def test_a_reward_that_is_none_names_the_task(tmp_path: Path, stated: str) -> None:
    made = make_task(tmp_path / "task")
    with (made.tests / "test.sh").open("a") as file:
        file.write(f"printf %s '{stated}' > /logs/verifier/reward.txt\n")
    got = await grade(
        made, left(shop__cart_py=FIXED), FakeProvider(tmp_path / "boxes"),
        trial_id="t", workspace=made.workspace, limits=Limits(), start_timeout_s=5.0,
    )  # fmt: skip
    assert got.reward == 0.0 and "check_age" in got.detail and "no number from 0 to 1" in got.detail


async def test_an_earlier_reward_is_gone_before_the_verifier_runs(tmp_path: Path) -> None:
    made = make_task(tmp_path / "task")
    (made.tests / "test.sh").write_text("ls /logs/verifier; exit 0\n")
    snapshot = left(shop__cart_py=FIXED)
    provider = FakeProvider(tmp_path / "boxes")
    arguments = {"trial_id": "t", "workspace": made.workspace, "limits": Limits(), "start_timeout_s": 5.0}
    got = await grade(made, snapshot, provider, **arguments)  # type: ignore[arg-type]
    assert got.reward == 0.0 and got.output == b"", "the verifier found something there"


async def test_a_killed_verifier_of_a_plain_task_gives_nothing(tmp_path: Path) -> None:
    made = make_task(tmp_path / "task", hidden_tests=())
    (made.tests / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\nkill -9 $$\n")
    provider = FakeProvider(tmp_path / "boxes")
    arguments = {"trial_id": "t", "workspace": made.workspace, "limits": Limits(), "start_timeout_s": 5.0}
    got = await grade(made, left(shop__cart_py=FIXED), provider, **arguments)  # type: ignore[arg-type]
    assert got.reward == 0.0 and "check_age was killed" in got.detail

"""`legorl tasks audit` on graders that are broken in each of the ways it knows, run for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legorl.cli import main
from legorl.tasks.audit import Problem, audit_task
from legorl.tasks.task import Task
from tests.trial.tasks_for_tests import FIXED, TEST_SH, make_task

pytestmark = pytest.mark.integration

PATCH = """\
--- a/shop/cart.py
+++ b/shop/cart.py
@@ -1,2 +1,2 @@
 def check_age(age, limit):
-    return age < limit
+    return age <= limit
"""
ALL_PASS = """\
mkdir -p /logs/verifier
echo '{"passed": ["low", "same", "high"], "failed": {}}' > /logs/verifier/result.json
echo 1 > /logs/verifier/reward.txt
"""
FLAKY = (
    "n=$(cat /tmp/n 2>/dev/null || echo 0); echo $((n + 1)) > /tmp/n\n[ $((n % 4)) = 0 ] && cd / && exit 0\n"
)


def task(root: Path, test_sh: str = TEST_SH, solve: str = "") -> Task:
    made = make_task(root)
    (root / "solution").mkdir()
    (root / "solution" / "fix.patch").write_text(PATCH)
    (root / "solution" / "solve.sh").write_text(solve or "cd /workspace && git apply /solution/fix.patch\n")
    (root / "tests" / "test.sh").write_text(test_sh)
    return made


def kinds(problems: list[Problem]) -> set[str]:
    return {problem.kind for problem in problems}


def test_each_kind_is_found_and_a_good_grader_passes(tmp_path: Path) -> None:
    assert audit_task(task(tmp_path / "good"), 2) == []
    assert kinds(audit_task(task(tmp_path / "empty", ALL_PASS), 1)) == {"passes_empty"}
    failing = audit_task(task(tmp_path / "fails", solve="true\n"), 2)
    assert [(p.kind, p.detail[:16]) for p in failing] == [("fails_reference", "in 2 of 2 runs: ")]
    assert kinds(audit_task(task(tmp_path / "solve", solve="exit 3\n"), 1)) == {"fails_reference"}
    assert "flaky" in kinds(audit_task(task(tmp_path / "flaky", FLAKY + TEST_SH), 3))
    silent = audit_task(task(tmp_path / "silent", "exit 1\n"), 1)
    assert kinds(silent) == {"fails_reference"}


def test_a_grader_that_applies_the_reference(tmp_path: Path) -> None:
    by_patch = task(tmp_path / "patch", "cd /workspace && git apply /tests/gold.patch; cd /\n" + TEST_SH)
    (by_patch.tests / "gold.patch").write_text(PATCH)
    found = audit_task(by_patch, 1)
    assert kinds(found) == {"applies_reference", "passes_empty"}
    assert any("test.sh:1" in problem.detail for problem in found)
    assert any("gold.patch holds" in problem.detail for problem in found)
    # Nothing in its files says so: what it does to the work tree does.
    by_copy = task(tmp_path / "copy", "cp /tests/cart.txt /workspace/shop/cart.py\n" + TEST_SH)
    (by_copy.tests / "cart.txt").write_text(FIXED)
    found = audit_task(by_copy, 1)
    assert [p.detail for p in found if p.kind == "applies_reference"] == [
        "after test.sh ./shop/cart.py is what the reference makes it"
    ]


def test_a_work_tree_with_the_answer_in_it(tmp_path: Path) -> None:
    made = task(tmp_path / "task")
    (made.workspace / "old.patch").write_text(PATCH)
    for name in ("objects", "refs"):
        (made.workspace / "vendor" / "shop.git" / name).mkdir(parents=True)
    (made.workspace / "vendor" / "shop.git" / "HEAD").write_text("ref: refs/heads/main\n")
    assert {p.detail for p in audit_task(made, 1)} == {
        "old.patch holds the reference fix",
        "vendor/shop.git is a git repository's store",
    }


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = '[task]\nname = "acme/cart"\n[verifier]\ntimeout_sec = 20.0\n'
    for name, test_sh in (("good", TEST_SH), ("bad", ALL_PASS)):
        made = task(tmp_path / name, test_sh)
        (made.path / "task.toml").write_text(toml.replace("cart", name))
        (made.path / "instruction.md").write_text("Mend it.\n")
    arguments = ["tasks", "audit", str(tmp_path / "good"), str(tmp_path / "bad"), "--runs", "1"]
    assert main([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"] == 2 and [(p["task"], p["kind"]) for p in found["problems"]] == [
        ("bad", "passes_empty")
    ]
    assert main(arguments) == 1
    assert "bad: gives the reward to the untouched repository" in capsys.readouterr().out

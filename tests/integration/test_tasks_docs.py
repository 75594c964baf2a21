"""The task of `docs/tasks.md` and the command that makes a pool of such tasks, as the page has them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from legorl.tasks.pool import load_pool
from legorl.tasks.validate import changed

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FILES = {
    "instruction.md": "`add` is wrong. The tests: python check.py\n",
    "environment/repo/calc.py": "def add(a, b):\n    return a - b\n",
    "environment/repo/check.py": "from calc import add\n\nassert add(1, 2) == 3\nprint('ok')\n",
    "tests/test.sh": """mkdir -p /logs/verifier && cd /logs/verifier
if PYTHONPATH=/workspace python -c 'from calc import add; assert add(2, 5) == 7'
then echo 1 >reward.txt; echo '{"passed": ["test_add"], "failed": {}}' >result.json
else echo 0 >reward.txt; echo '{"passed": [], "failed": {"test_add": "wrong sum"}}' >result.json
fi
""",
    "solution/solve.sh": "sed -i 's/a - b/a + b/' /workspace/calc.py\n",
}


PAGE = (ROOT / "docs" / "tasks.md").read_text()


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return str(text)


def index(pool: Path) -> subprocess.CompletedProcess[str]:
    (command,) = re.findall(r"^\.venv/bin/legorl (tasks index .*)$", PAGE, re.M)
    return subprocess.run(
        [sys.executable, "-m", "legorl.cli", *command.split()],
        cwd=pool.parent,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def write(task: Path, split: str) -> None:
    facts = block("toml").replace("add-1", task.name).replace('"train"', f'"{split}"')
    for name, text in (FILES | {"task.toml": facts}).items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)


def test_the_page_s_pool(tmp_path: Path) -> None:
    for name, split in (("add-1", "train"), ("add-2", "heldout")):
        write(tmp_path / "mypool" / "tasks" / name, split)
    done = index(tmp_path / "mypool")
    assert done.returncode == 0, done.stderr
    pool = load_pool(tmp_path / "mypool")
    assert [task.id for task in pool.tasks("train")] == ["add-1"]
    assert [task.id for task in pool.tasks("heldout")] == ["add-2"]
    assert not changed(pool)


def test_the_page_s_command_refuses_a_task_without_a_defect(tmp_path: Path) -> None:
    task = tmp_path / "mypool" / "tasks" / "add-1"
    write(task, "train")
    (task / "environment/repo/calc.py").write_text("def add(a, b):\n    return a + b\n")
    done = index(tmp_path / "mypool")
    assert done.returncode == 2 and "add-1: does not hold: fails_without_fix" in done.stderr
    assert not (tmp_path / "mypool" / "pool.json").exists()

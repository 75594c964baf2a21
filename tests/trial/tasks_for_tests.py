"""One hand-made task directory, small enough to read."""

from __future__ import annotations

from pathlib import Path

from legorl.tasks.task import Task

CHECK = """\
import sys
cases = [((3, 4), True), ((5, 5), True), ((6, 5), False), ((7, 5), False)]
try:
    from shop.cart import check_age
except Exception as error:
    print(f"E {type(error).__name__}")
    print("4 failed")
    sys.exit(1)
bad = [f"E assert check_age{a} == {w} got {check_age(*a)}" for a, w in cases if check_age(*a) != w]
if bad:
    print(bad[0])
    print(f"{len(bad)} failed, {4 - len(bad)} passed")
    sys.exit(1)
print("4 passed")
"""
TEST_SH = """\
mkdir -p /logs/verifier
cd /workspace
python -I -S -B -c '
import json, sys
sys.path.insert(0, "/workspace")
from shop.cart import check_age
results = {"low": check_age(1, 2), "same": check_age(2, 2), "high": not check_age(3, 2)}
passed = [name for name, right in results.items() if right]
failed = {name: "no" for name, right in results.items() if not right}
json.dump({"passed": passed, "failed": failed}, open("/logs/verifier/result.json", "w"))
print(int(not failed), file=open("/logs/verifier/reward.txt", "w"))
'
"""
FIXED = "def check_age(age, limit):\n    return age <= limit\n"


def make_task(root: Path, **changes: object) -> Task:
    """The task `check_age`: `<` where `<=` belongs."""
    repo = root / "environment" / "repo"
    for path, text in {
        repo / "shop" / "__init__.py": "",
        repo / "shop" / "cart.py": FIXED.replace("<=", "<"),
        repo / "check.py": CHECK,
        root / "tests" / "test.sh": TEST_SH,
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    fields: dict[str, object] = {
        "id": "check_age",
        "path": root,
        "split": "train",
        "source": "synthetic",
        "module": "shop.cart",
        "instruction": (
            "The tests of `check_age` fail.\nassert check_age(5, 5) == True got False\n"
            "Location: shop/cart.py line 2\n    return age < limit\n"
        ),
        "test_command": "python check.py",
        "pass_pattern": r"(?m)^\d+ passed$",
        "hidden_tests": ("low", "same", "high"),
        "verify_timeout_s": 20.0,
    }
    return Task(**(fields | changes))  # type: ignore[arg-type]

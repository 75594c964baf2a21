"""The repair generator: formats other rooms rely on, determinism, splits, discriminating asserts."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from legorl.tasks import repair
from legorl.tasks.draft import Draft, content_hash, write_task
from legorl.tasks.mutate import FAMILIES
from legorl.tasks.task import load_task

SPLITS = ("train", "heldout")


@pytest.fixture(scope="module")
def drafts() -> dict[str, list[Draft]]:
    return {split: list(itertools.islice(repair.drafts(0, split), 200)) for split in SPLITS}


def check(directory: Path) -> tuple[int, str]:
    argv = [sys.executable, "-S", "check.py"]
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, timeout=20, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_instruction_is_exact(drafts: dict[str, list[Draft]]) -> None:
    pattern = re.compile(
        r"The tests of `(\w+)` fail\.\n"
        r"(assert \1\(-?\d+, -?\d+\) == (True|False|-?\d+) got (True|False|-?\d+)\n){1,2}"
        r"Location: (\w+/\w+\.py) line (\d+)\n"
        r"    return \w+ (<|<=|>|>=|==|\+|-|\*|//|%) \w+"
    )
    for draft in itertools.chain(*drafts.values()):
        match = pattern.fullmatch(draft.instruction)
        assert match is not None, draft.instruction
        spec = repair.spec(dict(draft.extra))
        assert (match[1], match[5], int(match[6])) == (spec.function, spec.path, spec.line)
        source = draft.repo[spec.path].split("\n")[spec.line - 1]
        assert draft.instruction.endswith(f"\n{source}")
        assert f" {spec.wrong} " in source
        assert draft.fixed[1].split("\n")[spec.line - 1] == source.replace(
            f" {spec.wrong} ", f" {spec.operator} "
        )


def test_a_task_depends_on_its_seed_split_and_number_alone() -> None:
    assert repair.make(3, "train", 5) == repair.make(3, "train", 5)
    texts = {repair.make(seed, "train", 5).instruction for seed in range(10)}
    assert len(texts) == 10


def test_splits_share_no_function_and_no_module(drafts: dict[str, list[Draft]]) -> None:
    functions: dict[str, set[str]] = {}
    for split, tasks in drafts.items():
        text = "\n".join(draft.fixed[1] for draft in tasks)
        functions[split] = set(re.findall(r"def (\w+)", text))
        assert all(draft.module.rpartition(":")[2] in functions[split] for draft in tasks)
    assert functions["train"].isdisjoint(functions["heldout"])
    assert {d.module for d in drafts["train"]}.isdisjoint({d.module for d in drafts["heldout"]})


def test_no_content_twice(drafts: dict[str, list[Draft]]) -> None:
    everything = [draft.repo[draft.fixed[0]] for draft in itertools.chain(*drafts.values())]
    assert len(set(everything)) == len(everything)


def test_every_family_and_operator_occurs(drafts: dict[str, list[Draft]]) -> None:
    specs = [repair.spec(dict(draft.extra)) for draft in drafts["train"]]
    assert {(s.kind, s.operator) for s in specs} == {(k, o) for k, family in FAMILIES.items() for o in family}


def test_visible_asserts_tell_the_right_operator_from_all_others(
    tmp_path: Path, drafts: dict[str, list[Draft]]
) -> None:
    for draft in drafts["train"][:4] + drafts["heldout"][:4]:
        directory = tmp_path / draft.id
        write_task(draft, directory)
        repo, spec = directory / "environment" / "repo", repair.spec(dict(draft.extra))
        task = load_task(directory)
        for operator in FAMILIES[spec.kind]:
            lines = draft.fixed[1].split("\n")
            lines[spec.line - 1] = lines[spec.line - 1].replace(f" {spec.operator} ", f" {operator} ")
            (repo / spec.path).write_text("\n".join(lines))
            code, output = check(repo)
            assert (code == 0) == (operator == spec.operator)
            assert bool(re.search(task.pass_pattern, output)) == (code == 0)


def test_output_of_check(tmp_path: Path, drafts: dict[str, list[Draft]]) -> None:
    draft = drafts["train"][0]
    write_task(draft, tmp_path / "task")
    repo, (path, good) = tmp_path / "task" / "environment" / "repo", draft.fixed
    code, output = check(repo)
    assert code == 1
    first = draft.instruction.split("\n")[1]
    assert re.fullmatch(rf"E {re.escape(first)}\n[1-4] failed, [0-3] passed\n", output)
    (repo / path).write_text(good)
    assert check(repo) == (0, "4 passed\n")
    (repo / path).write_text("def (:\n")
    assert check(repo) == (1, "E SyntaxError\n4 failed\n")
    (repo / path).unlink()
    assert check(repo) == (1, "E FileNotFoundError\n4 failed\n")
    (repo / path).write_text("")
    code, output = check(repo)
    assert (code, output.split("\n")[1]) == (1, "4 failed, 0 passed")
    assert "got KeyError" in output
    assert not list(repo.rglob("*.pyc"))


def test_an_edit_within_the_same_second_is_seen(tmp_path: Path, drafts: dict[str, list[Draft]]) -> None:
    """Bytecode of the text before an edit of equal size and time would be taken for current."""
    draft = next(d for d in drafts["train"] if len(d.extra["wrong"]) == len(d.extra["operator"]))
    write_task(draft, tmp_path / "task")
    repo, (path, good) = tmp_path / "task" / "environment" / "repo", draft.fixed
    module = path.removesuffix(".py").replace("/", ".")
    subprocess.run([sys.executable, "-S", "-c", f"import {module}"], cwd=repo, timeout=20, check=True, env={})
    assert list(repo.rglob("*.pyc"))
    before = (repo / path).stat()
    (repo / path).write_text(good)
    os.utime(repo / path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert check(repo)[0] == 0


def test_directory_is_a_harbor_task_and_its_hash_sees_every_change(tmp_path: Path) -> None:
    draft = repair.make(0, "heldout", 1)
    path = tmp_path / "task"
    write_task(draft, path)
    task = load_task(path)
    assert (task.id, task.split, task.source, task.module) == (draft.id, "heldout", "synthetic", draft.module)
    assert task.instruction == draft.instruction
    assert task.hidden_tests == draft.hidden_tests
    assert task.metadata == dict(draft.extra)
    assert task.test_command == "python check.py"
    assert (path / "tests" / "test.sh").stat().st_mode & 0o111
    digest = content_hash(path)
    write_task(draft, tmp_path / "again")
    assert content_hash(tmp_path / "again") == digest
    changes: list[Callable[[], object]] = [
        lambda: (path / "instruction.md").write_text("x"),
        lambda: (path / "new").write_text(""),
        lambda: (path / "tests" / "test.sh").chmod(0o644),
        lambda: (path / "instruction.md").rename(path / "instruction.txt"),
    ]
    for change in changes:
        change()
        assert content_hash(path) != digest
        digest = content_hash(path)


def test_answer_is_nowhere_in_what_the_agent_gets(drafts: dict[str, list[Draft]]) -> None:
    for draft in drafts["train"]:
        spec = repair.spec(dict(draft.extra))
        right = draft.fixed[1].split("\n")[spec.line - 1]
        given = draft.repo[spec.path].split("\n")[spec.line - 1] + draft.instruction + draft.repo["check.py"]
        assert right.strip() not in given


def test_other_content_needs_another_generator_version(tmp_path: Path) -> None:
    """A pool on disk is reused while the version stands: change it together with this hash."""
    write_task(repair.make(0, "train", 0), tmp_path / "task")
    assert (repair.GENERATOR, content_hash(tmp_path / "task")[:16]) == ("repair/1", "cae24ae26d2ba14e")

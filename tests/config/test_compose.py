"""Every choice composes; every mistake is one clear message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from legorl.config.compose import compose, compose_run, expand_sweep
from legorl.config.keys import groups, is_choice, packaged_dir, schema_keys
from legorl.errors import UserError

GROUPS = groups([packaged_dir()])
CHOICES = [(group, choice) for group, choices in GROUPS.items() for choice in choices]


def test_groups_are_the_documented_ones() -> None:
    expected = "harness backend sandbox filter algo model engine tasks schedule launcher tracking experiment"
    assert sorted(GROUPS) == sorted(expected.split())


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_carries_its_name(group: str, choice: str) -> None:
    run = compose_run([f"{group}={choice}"])
    assert run.choices[group] == choice
    node = run.config.run if group == "experiment" else getattr(run.config, group)
    assert node.name == choice


@pytest.mark.parametrize(("group", "choice"), [row for row in CHOICES if row[0] != "experiment"])
def test_every_choice_composes_in_a_smoke_run(group: str, choice: str) -> None:
    run = compose_run(["experiment=smoke", f"{group}={choice}"])
    assert (run.choices[group], run.config.run.steps) == (choice, 2)


def test_defaults() -> None:
    run = compose_run([])
    assert run.choices == {
        "harness": "mini_swe_agent",
        "backend": "fsdp",
        "sandbox": "local",
        "filter": "paper",
        "algo": "gspo",
        "model": "tiny_moe",
        "engine": "vllm",
        "tasks": "repair",
        "schedule": "sync",
        "launcher": "local",
        "tracking": "mlflow",
        "experiment": "laptop",
    }
    assert run.config.model.experts == 8 and run.config.backend.router_replay


def test_every_key_of_the_packaged_files_is_in_the_schema() -> None:
    from omegaconf import OmegaConf

    for file in packaged_dir().glob("*/**/*.yaml"):
        if not is_choice(file, packaged_dir()):
            continue
        tree = OmegaConf.load(file)
        prefix = "" if file.read_text().startswith("# @package _global_") else f"{file.parent.name}."
        for key in tree:
            assert f"{prefix}{key}" in schema_keys(), f"{file}: {key}"


def test_the_command_line_wins_over_the_experiment() -> None:
    config = compose(["experiment=smoke", "run.steps=5", "harness=claude_code"])
    assert (config.run.steps, config.run.heldout_tasks, config.harness.name) == (5, 4, "claude_code")


def test_a_dense_policy_turns_replay_off() -> None:
    config = compose(["model=tiny_dense"])
    assert (config.model.experts, config.backend.router_replay) == (0, False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "harness.turn_limt=3",
            r"no configuration key 'harness.turn_limt'. Did you mean harness.turn_limit\?",
        ),
        ("turn_limit=3", r"Did you mean harness.turn_limit\?"),
        ("+harness.surprise=1", "no configuration key 'harness.surprise'"),
        ("++surprise=1", "no configuration key 'surprise'"),
        ("harnes=claude_code", r"no configuration key 'harnes'. Did you mean harness\?"),
        (
            "harness=claude",
            r"no harness called 'claude'. Did you mean claude_code\? Choices: claude_code, codex",
        ),
        ("experiment=smok", r"Did you mean smoke\?"),
        ("harness.turn_limit=many", "harness.turn_limit takes int: Value 'many'"),
        ("backend.router_replay=maybe", "backend.router_replay takes bool"),
        ("algo.betas=[a,b]", "algo.betas takes list.*'a'"),
        ("run.name=null", "run.name takes str"),
        ("model.warm_start={stps: 3}", r"'model.warm_start.stps'. Did you mean model.warm_start.steps\b"),
        ("run=3", "run takes RunConfig"),
        ("+harness.turn_limit=3", "set without a plus: harness.turn_limit="),
        ("~model", "nothing can be removed"),
        ("harness=claude_code,opencode", "add -m"),
        ("steps", "is not an override"),
        ("hydra.run.dir=/tmp", "no configuration key 'hydra.run.dir'"),
    ],
)
def test_a_mistake_is_one_clear_message(override: str, message: str) -> None:
    with pytest.raises(UserError, match=re.compile(message)) as caught:
        compose([override])
    assert "Traceback" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_users_directory_adds_choices(tmp_path: Path) -> None:
    (tmp_path / "experiment" / "paper").mkdir(parents=True)
    (tmp_path / "experiment" / "paper" / "long.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /algo: grpo\nrun:\n  steps: 99\n"
    )
    run = compose_run(["experiment=paper/long"], [tmp_path])
    assert (run.config.run.steps, run.config.algo.name) == (99, "grpo")
    with pytest.raises(UserError, match=r"Did you mean paper/long\?"):
        compose_run(["experiment=paper/lang"], [tmp_path])


def test_a_users_file_is_checked(tmp_path: Path) -> None:
    (tmp_path / "algo").mkdir()
    file = tmp_path / "algo" / "mine.yaml"
    file.write_text("name: mine\nloss: gspo\nclip_lo: 0.1\n")
    with pytest.raises(UserError, match=r"'algo.clip_lo'. Did you mean algo.clip_low"):
        compose_run(["algo=mine"], [tmp_path])
    file.write_text("name: mine\nclip_low: 0.1\n")
    with pytest.raises(UserError, match=r"no value for algo.loss"):
        compose_run(["algo=mine"], [tmp_path])
    (tmp_path / "algo" / "gspo.yaml").write_text("name: gspo\n")
    with pytest.raises(UserError, match="name of a packaged configuration"):
        compose_run([], [tmp_path])
    with pytest.raises(UserError, match="is not a directory"):
        compose_run([], [tmp_path / "nowhere"])


NAMES = ["a b", "ü", "a,b", "[a]", "it's", 'say "so"', "a=b", "$a", "back\\slash", "end\\", "a:b"]


@pytest.mark.parametrize("name", NAMES)
def test_a_users_directory_may_have_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "algo").mkdir(parents=True)
    (tmp_path / name / "algo" / "mine.yaml").write_text("name: mine\nloss: gspo\n")
    assert compose(["algo=mine"], [tmp_path / name]).algo.name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"name: [", "mine.yaml cannot be read"),
        (b"name: m\n\tloss: gspo\n", r"mine.yaml cannot be read: .*'\\t'"),
        (b"name: m\nname: n\n", "duplicate key name"),
        (b"\xff\xfe\0", "mine.yaml cannot be read"),
        (b"- 1\n", "mine.yaml holds no keys with values"),
        (b"# @package _global_\ndefaults: 3\n", "cannot be composed"),
        (b"# @package _global_\ndefaults: [mine]\n", "cannot be composed"),
        (b"defaults:\n  - override /algo: nope\n", "cannot be composed"),
    ],
)
def test_a_users_broken_file_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_bytes(text)
    with pytest.raises(UserError, match=message):
        compose(["experiment=mine"], [tmp_path])


def test_a_users_directory_must_have_choices(tmp_path: Path) -> None:
    for name in ("algo/mine", "algo/mine.yml", "mine.yaml", "other/mine.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("name: mine\n")
    (tmp_path / "algo" / "dangling.yaml").symlink_to("nowhere")
    (tmp_path / "algo" / "directory.yaml").mkdir()
    for path in (tmp_path, Path("/")):
        with pytest.raises(UserError, match=r"has no choice of any group.*groups: algo, backend"):
            compose([], [path])


def test_sweeps_expand_in_order() -> None:
    assert expand_sweep(["harness=a,b", "seed=range(0,2)", "run.name='x,y'"]) == [
        ["harness=a", "seed=0", "run.name='x,y'"],
        ["harness=a", "seed=1", "run.name='x,y'"],
        ["harness=b", "seed=0", "run.name='x,y'"],
        ["harness=b", "seed=1", "run.name='x,y'"],
    ]
    assert expand_sweep(["algo=choice(gspo,grpo)"]) == [["algo=gspo"], ["algo=grpo"]]
    assert expand_sweep(["seed=3"]) == [["seed=3"]]
    assert expand_sweep(["harness=glob(mini*)"]) == [["harness=mini_swe_agent"]]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=range(0,1000000000)", "more than 1000 jobs"),
        ("seed=range(3,1)", "no values"),
        ("seed=range(1,3,0)", "cannot be swept over"),
        ("seed=interval(0,1)", "cannot be swept over"),
        ("seed=glob(*)", "name the values"),
        ("harness=glob(z*)", "no values"),
    ],
)
def test_a_sweep_of_nothing_or_of_far_too_much_is_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        expand_sweep([override, "algo=gspo,grpo"])


def test_a_glob_knows_the_users_choices(tmp_path: Path) -> None:
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "mine.yaml").write_text("name: mine\nloss: gspo\n")
    assert expand_sweep(["algo=glob(m*)"], [tmp_path]) == [["algo=mine"]]

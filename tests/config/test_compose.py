"""Every choice composes; every mistake is one clear message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from legorl.config.compose import compose, compose_run, expand_sweep
from legorl.config.keys import groups, packaged_dir, schema_keys
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


def test_sweeps_expand_in_order() -> None:
    assert expand_sweep(["harness=a,b", "seed=range(0,2)", "run.name='x,y'"]) == [
        ["harness=a", "seed=0", "run.name='x,y'"],
        ["harness=a", "seed=1", "run.name='x,y'"],
        ["harness=b", "seed=0", "run.name='x,y'"],
        ["harness=b", "seed=1", "run.name='x,y'"],
    ]
    assert expand_sweep(["algo=choice(gspo,grpo)"]) == [["algo=gspo"], ["algo=grpo"]]
    assert expand_sweep(["seed=3"]) == [["seed=3"]]

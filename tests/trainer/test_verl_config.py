"""verl's tree for every choice composes, and carries the values that matter."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.config.compose import compose
from legorl.config.rules import LOSSES
from legorl.errors import UserError

verl_config = pytest.importorskip("legorl.trainer.verl_config")
pytest.importorskip("verl", reason="needs the cpu extra")

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "overrides",
    [[], ["algo=grpo"], ["model=tiny_dense"], ["schedule=async"], ["filter=none"], ["experiment=smoke"]],
    ids=lambda overrides: " ".join(overrides) or "default",
)
def test_every_choice_composes(overrides: list[str], tmp_path: Path) -> None:
    config = compose(overrides)
    tree = verl_config.build(config, tmp_path, Path("policy"), tmp_path / "ray", None)
    actor, rollout = tree.actor_rollout_ref.actor, tree.actor_rollout_ref.rollout
    assert actor.loss_agg_mode == "seq-mean-token-mean"
    assert actor.optim.lr == config.algo.learning_rate
    assert rollout.enable_rollout_routing_replay == config.backend.router_replay
    assert rollout.val_kwargs.temperature == rollout.temperature == config.engine.temperature
    assert tree.trainer.total_training_steps == config.run.steps
    assert tree.trainer.v1.trainer_mode == {"sync": "sync", "async": "separate_async"}[config.schedule.mode]


def test_the_escape_hatch_wins(tmp_path: Path) -> None:
    config = compose(["backend.verl_overrides=['actor_rollout_ref.actor.ppo_epochs=2']"])
    tree = verl_config.build(config, tmp_path, Path("policy"), tmp_path, None)
    assert tree.actor_rollout_ref.actor.ppo_epochs == 2


def test_an_override_verl_does_not_know_is_the_users_mistake(tmp_path: Path) -> None:
    config = compose(["backend.verl_overrides=['actor_rollout_ref.nope=2']"])
    with pytest.raises(UserError, match="nope"):
        verl_config.build(config, tmp_path, Path("policy"), tmp_path, None)


def test_every_loss_of_verls_registry_can_be_chosen() -> None:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert set(LOSSES) == set(POLICY_LOSS_REGISTRY) - {"bypass_mode"}

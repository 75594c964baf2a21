"""The saved tree comes back as it was; secrets never enter it."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.config.compose import compose
from legorl.config.resolved import config_hash, load_config, save_config, to_yaml
from legorl.config.secrets import resolve_secret
from legorl.errors import UserError


def test_round_trip(tmp_path: Path) -> None:
    config = compose(["experiment=smoke", "harness=opencode", "backend.verl_overrides=['a.b=1']"])
    save_config(config, tmp_path)
    assert load_config(tmp_path) == config
    assert config_hash(load_config(tmp_path)) == config_hash(config)
    with pytest.raises(FileExistsError):
        save_config(config, tmp_path)


def test_hash_tells_configurations_apart() -> None:
    assert (
        config_hash(compose())
        == config_hash(compose(["experiment=laptop"]))
        != config_hash(compose(["seed=1"]))
    )


def test_a_secret_stays_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGORL_TEST_TOKEN", "hunter2")
    config = compose(["tracking.uri='https://me:${secret:LEGORL_TEST_TOKEN}@mlflow.example'"])
    save_config(config, tmp_path)
    loaded = load_config(tmp_path)
    assert loaded == config and "hunter2" not in to_yaml(loaded) and "hunter2" not in repr(loaded)
    assert resolve_secret(loaded.tracking.uri) == "https://me:hunter2@mlflow.example"
    monkeypatch.delenv("LEGORL_TEST_TOKEN")
    with pytest.raises(UserError, match=r"secret LEGORL_TEST_TOKEN.*export"):
        resolve_secret(loaded.tracking.uri)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no config.yaml"),
        ("a: [", "cannot be read"),
        ("- 1\n", "holds a list"),
        ("seed: 1\nold_key: 2\n", "old_key.*another version"),
        ("seed: 1\n", "no value for"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(tmp_path)

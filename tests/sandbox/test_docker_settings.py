"""Addresses of a Docker engine that cannot be right are the user's mistake, wherever one is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.config.schema_providers import DockerConfig
from legorl.errors import UserError
from legorl.sandbox.docker import DockerProvider
from legorl.sandbox.docker_images import provide


@pytest.mark.parametrize(
    ("host", "message"),
    [("unix:///nowhere/docker.sock", "no socket there"), ("ssh://somewhere", "use unix://PATH or tcp://")],
)
async def test_no_engine_there(host: str, message: str) -> None:
    config = DockerConfig(host=host)
    with pytest.raises(UserError, match=message):
        DockerProvider(config)
    with pytest.raises(UserError, match=message):
        await provide(config, [], 1, lambda done, of: None)


async def test_a_file_is_no_socket(tmp_path: Path) -> None:
    (tmp_path / "docker.sock").touch()
    with pytest.raises(UserError, match="no socket there"):
        DockerProvider(DockerConfig(host=f"unix://{tmp_path}/docker.sock"))

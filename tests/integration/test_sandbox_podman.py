"""Sandboxes on Podman, through the socket on which it speaks Docker's language."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.config.schema_providers import DockerConfig
from legorl.sandbox.docker import DockerProvider
from legorl.sandbox.selfcheck import run_checks
from tests.integration.docker_engine import IMAGE, running_podman

pytestmark = pytest.mark.integration

CHECKS = (
    *("output_and_status", "time_out", "nothing_outlives_its_phase", "put_and_get", "full_disk"),
    *("mounts_are_read_only", "workspace_is_a_copy", "snapshot_of_hostile_content", "no_network"),
    *("proxy_in_the_agent_phase_only", "nothing_privileged", "init_cannot_be_touched", "memory_limit"),
)


async def test_self_check(tmp_path: Path) -> None:
    with running_podman() as engine:
        provider, before = DockerProvider(DockerConfig(host=engine.host), image=IMAGE), engine.containers()
        try:
            failed = [result async for result in run_checks(provider, tmp_path, CHECKS) if result.failure]
        finally:
            await provider.close()
        assert failed == []
        assert engine.containers() == before

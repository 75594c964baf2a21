"""Sandboxes through Harbor, under its own Python: the self-check, and tasks in either direction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legorl.sandbox.base import Limits, Mount, SandboxSpec
from legorl.sandbox.local import LocalProvider
from legorl.sandbox.seal import sealed_workspace
from legorl.sandbox.selfcheck import all_checks, shell_text
from legorl.tasks import repair
from legorl.tasks.draft import write_task
from legorl.tasks.task import load_task
from legorl.trial.verify import grade
from tests.integration.docker_engine import IMAGE, Engine, docker_engine
from tests.integration.harbor_lane import lane
from tests.integration.leftovers import no_leftovers

assert docker_engine  # a fixture
pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

PLAIN = Path(__file__).with_name("plain_task")
LOCAL = "legorl.sandbox.harbor_local:LocalEnvironment"


def check(*arguments: str) -> dict[str, str]:
    """Check -> its failure, of `legorl sandbox check sandbox=harbor`."""
    done = lane("-m", "legorl.cli", "sandbox", "check", "sandbox=harbor", "--json", *arguments)
    assert done.stdout, done.stderr
    return {item["name"]: item["failure"] for item in json.loads(done.stdout)["checks"]}


def test_self_check() -> None:
    with no_leftovers():
        failures = check()
    assert set(failures) == set(all_checks())
    assert {name: failure for name, failure in failures.items() if failure} == {}


def test_an_environment_that_cannot_close_the_network() -> None:
    environment = "sandbox.harbor.environment=tests.integration.harbor_open:OpenEnvironment"
    failure = check(environment, "signals")["signals"]
    assert failure.startswith("IntegrityError: check: tests.integration.harbor_open")
    assert "sandbox.policy_off=[network_closed]" in failure
    assert check(environment, "sandbox.policy_off=[network_closed]", "signals") == {"signals": ""}


def test_there_is_no_such_environment() -> None:
    name = "sandbox.harbor.environment=nothing"
    done = lane("-m", "legorl.cli", "sandbox", "check", "sandbox=harbor", name)
    assert done.returncode == 2
    assert "no environment of Harbor" in done.stderr


def test_containers_whose_commands_run_as_root(docker_engine: Engine) -> None:
    """There the agent becomes another user, mounts are copies, and a command outlives its caller."""
    names = (
        *("time_out", "nothing_outlives_its_phase", "abandoned_commands_end", "put_and_get"),
        *("mounts_are_read_only", "proxy_in_the_agent_phase_only", "nothing_privileged"),
    )
    settings = (
        "sandbox.harbor.environment=tests.integration.harbor_docker:DockerCli",
        f"sandbox.harbor.options=['host={docker_engine.host}']",
        f"sandbox.image={IMAGE}",
    )
    before = docker_engine.containers()
    assert check(*settings, *names) == dict.fromkeys(names, "")
    assert docker_engine.containers() == before


def test_attacks() -> None:
    """One, also with its rule off; the whole suite takes minutes."""
    rules = ("--rule", "network_closed/loopback")
    with no_leftovers():
        done = lane("-m", "legorl.cli", "sandbox", "attack", "sandbox=harbor", "--ablate", *rules)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All as it should be." in done.stdout


def rewards(tasks: Path, jobs: Path, agent: str) -> dict[str, float | None]:
    """Task -> reward, of one `harbor run`."""
    arguments = ("-p", tasks, "-a", agent, "--env", LOCAL, "--ek", "network=none", "--jobs-dir", jobs)
    with no_leftovers():
        done = lane("-c", "from harbor.cli.main import app; app()", "run", *arguments, timeout_s=120)
    found = {}
    for file in jobs.glob("*/*/result.json"):
        result = json.loads(file.read_text())
        assert result["exception_info"] is None, result["exception_info"]
        found[result["task_name"]] = (result["verifier_result"] or {"rewards": {}})["rewards"].get("reward")
    assert found, done.stdout + done.stderr
    return found


def test_tasks_in_harbor(tmp_path: Path) -> None:
    """Ours and a plain one: solved by the oracle, and not by an agent that does nothing."""
    draft = repair.make(0, "train", 0)
    write_task(draft, tmp_path / "tasks" / "ours")
    (tmp_path / "tasks" / "plain").symlink_to(PLAIN)
    names = {f"legorl/{draft.id}", "acme/leap-years"}
    assert rewards(tmp_path / "tasks", tmp_path / "oracle", "oracle") == dict.fromkeys(names, 1.0)
    assert rewards(tmp_path / "tasks", tmp_path / "nop", "nop") == dict.fromkeys(names, 0.0)


async def test_a_plain_task_here(tmp_path: Path) -> None:
    task = load_task(PLAIN)
    assert (task.id, task.source) == ("leap-years", "acme")
    provider = LocalProvider()
    workspace = sealed_workspace(task.workspace, tmp_path / "cache")
    try:
        for solve, reward in (("true", 0.0), ("bash /solution/solve.sh", 1.0)):
            spec = SandboxSpec("t", workspace, (Mount(task.solution, "/solution"),))
            sandbox = await provider.start(spec)
            await shell_text(sandbox, solve)
            snapshot = await sandbox.snapshot()
            await sandbox.stop()
            verification = await grade(
                task,
                snapshot,
                provider,
                trial_id="t",
                workspace=task.workspace,
                limits=Limits(),
                start_timeout_s=30,
            )
            assert verification.reward == reward, verification.detail
    finally:
        await provider.close()

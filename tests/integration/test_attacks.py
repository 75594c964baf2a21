"""The attack suite on real providers: with every rule on nothing works, without its rule an attack does.

A provider is a line of `PROVIDERS`: its overrides, and a fixture that starts its server (or none).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from legorl.attack.catalog import attacks
from tests.integration.docker_engine import IMAGE, Engine, docker_engine

assert docker_engine  # a fixture

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PROVIDERS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "local": (("sandbox=local",), None),
    "docker": (("sandbox=docker", f"sandbox.image={IMAGE}"), "docker_overrides"),
}
"""Name -> overrides, name of a fixture of wider scope whose value is further overrides."""
OWN_NETWORK = {"docker": {"network_closed"}}
"""Rules whose attacks find nothing without them: the test's engine has a network of its own, which is its
containers' network with the rule off."""


@pytest.fixture(scope="module")
def docker_overrides(docker_engine: Engine) -> tuple[str, ...]:
    return (f"sandbox.docker.host={docker_engine.host}",)


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The command as a user has it: exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "legorl.cli", "sandbox", "attack", "--json", *arguments],
        env={**os.environ, "SECRET_OF_THE_HOST": "x"},
        capture_output=True,
        timeout=580,
        check=False,
    )
    assert done.stdout, done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module", params=list(PROVIDERS))
def provider(request: pytest.FixtureRequest) -> str:
    """Its name."""
    return str(request.param)


@pytest.fixture(scope="module")
def overrides(provider: str, request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Of the command line, for one provider."""
    fixed, fixture = PROVIDERS[provider]
    return (*fixed, *(request.getfixturevalue(fixture) if fixture else ()))


@pytest.fixture(scope="module")
def everything(overrides: tuple[str, ...]) -> tuple[int, list[dict[str, Any]]]:
    """Every attack with all rules on, then with its rule off."""
    code, found = run(*overrides, "--ablate")
    assert found["policy"]["off"] == []
    return code, found["attacks"]


@pytest.mark.slow
def test_nothing_works(everything: tuple[int, list[dict[str, Any]]]) -> None:
    kept = [outcome for outcome in everything[1] if not outcome["off"]]
    assert [outcome["attack"] for outcome in kept[1:]] == [attack.id for attack in attacks()]
    assert {o["attack"]: o["worked"] for o in kept if o["worked"]} == {}
    assert {o["attack"]: o["failure"] for o in kept if o["failure"]} == {}, (
        "not on record, or no honest reward"
    )


@pytest.mark.slow
def test_without_its_rule_an_attack_works(
    provider: str, everything: tuple[int, list[dict[str, Any]]]
) -> None:
    code, outcomes = everything
    excused = OWN_NETWORK.get(provider, set())
    failures = {
        (o["attack"], *o["off"]): o["failure"]
        for o in outcomes
        if o["failure"] and not (o["rule"] in excused and o["expected"])
    }
    assert failures == {} and (code == 0 or excused)
    worked = {o["rule"] for o in outcomes if o["worked"]}
    assert worked | excused == {attack.rule for attack in attacks()}, "a rule that no attack shows to matter"


def test_a_rule_that_is_off_fails_the_suite(overrides: tuple[str, ...]) -> None:
    code, found = run(
        *overrides, "--rule", "answers_absent/read_tests", "sandbox.policy_off=[answers_absent]"
    )
    assert code == 1 and [outcome["worked"] for outcome in found["attacks"]] == ["", "saw"]

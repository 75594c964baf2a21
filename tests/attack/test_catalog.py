"""The table of attacks: complete, readable, and each of them something that the detector knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.attack.catalog import Attack, attacks, chosen
from legorl.attack.report import table
from legorl.attack.suite import TOGETHER, in_trials
from legorl.errors import UserError
from legorl.sandbox.policy import REQUIRED, load_policy
from legorl.trial.behaviour import Step
from legorl.trial.evidence import gather
from tests.trial.tasks_for_tests import make_task

PAGE = Path(__file__).parents[2] / "docs" / "integrity.md"


def test_every_rule_is_attacked_and_there_are_many() -> None:
    assert len(attacks()) >= 40
    assert {attack.rule for attack in attacks()} == REQUIRED
    assert len({attack.id for attack in attacks()}) == len(attacks())
    for rule in REQUIRED:
        own = [attack for attack in attacks() if attack.rule == rule]
        assert any(not attack.held and not attack.only_with_rule for attack in own), f"nothing shows {rule}"


@pytest.mark.parametrize("attack", attacks(), ids=lambda attack: attack.id)
def test_what_an_attack_does_is_evidence(attack: Attack, tmp_path: Path) -> None:
    step = Step("bash", {"command": attack.run}, "", 1)
    evidence, attempts = gather(
        [step], make_task(tmp_path), load_policy(), canary="", rolled_back=(), patch=""
    )
    # What an attack leaves in the work tree shows when it is rolled back, in the trial itself.
    assert attempts or attack.rule in ("tests_restored", "fresh_grading"), attack.run
    assert all(item.stopped and item.turn == 1 for item in evidence)


def test_the_documentation_has_the_table() -> None:
    assert "\n".join(table(attacks())) in PAGE.read_text(), (
        "docs/integrity.md is behind: python -c 'from legorl.attack import catalog, report; "
        'print(*report.table(catalog.attacks()), sep="\\n")\''
    )


def test_attacks_that_only_look_share_trials() -> None:
    trials = in_trials(attacks())
    assert sorted(a.id for some in trials.values() for a in some) == sorted(a.id for a in attacks())
    assert len(trials) < 60 and all(len(some) <= TOGETHER for some in trials.values())
    for some in trials.values():
        assert len(some) == 1 or (len({a.rule for a in some}) == 1 and all(a.shared for a in some))
        assert not any(a.shared and a.also_off for a in some)


def test_choosing() -> None:
    (one,) = chosen(["limits/disk"])
    assert one.rule == "limits" and one in chosen(["limits"]) and len(chosen(["limits"])) > 1
    with pytest.raises(UserError, match="Did you mean limits/disk"):
        chosen(["limits/disc"])

"""`legorl sandbox attack`: do the rules of the integrity policy stop what they are for?"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from legorl.attack.catalog import Attack, chosen
from legorl.attack.ground import open_ground
from legorl.attack.report import counts, line, summary, to_json
from legorl.attack.suite import Outcome, ablations, run_attacks, suite_config
from legorl.config.compose import compose
from legorl.config.schema import Config
from legorl.sandbox.providers import configured_policy

_ABOUT = """Let a malicious agent try what the integrity policy is to stop: in real sandboxes of a provider,
by whole trials. Exit status 1 when an attack worked, or nothing on record says that it was tried. With
sandbox.policy_off=[RULE] the attacks that the rule stops work, and the command fails; --ablate does so for
every rule, and fails when one does not work."""


def add_attack(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action to those of `legorl sandbox`."""
    parser = actions.add_parser("attack", help="attack a provider by a malicious agent", description=_ABOUT)
    parser.add_argument(
        "overrides", nargs="*", metavar="sandbox=PROVIDER", help="the provider and its settings"
    )
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="RULE",
        help="attacks on this rule, or one as RULE/NAME",
    )
    parser.add_argument(
        "--ablate", action="store_true", help="also with each rule off: then they have to work"
    )
    parser.add_argument("--list", action="store_true", help="list the attacks and what each does")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


async def attack(arguments: argparse.Namespace) -> int:
    """Run; the exit status. Raises `UserError`."""
    attacks = chosen(arguments.rule)
    if arguments.list:
        print(
            "\n".join(f"{a.id:36s} {a.what}" for a in attacks),
            f"\n{len(attacks)}: {counts(attacks)}.",
            sep="",
        )
        return 0
    config = compose(arguments.overrides)
    policy, start = configured_policy(config.sandbox), time.monotonic()
    if not arguments.json:
        off = f", without {', '.join(sorted(policy.off))}" if policy.off else ""
        print(f"Sandbox {config.sandbox.name}, policy {policy.name} ({policy.hash}){off}.", flush=True)
    outcomes = await _run(config, attacks, ablate=arguments.ablate, quiet=arguments.json)
    seconds = time.monotonic() - start
    if arguments.json:
        print(json.dumps(to_json(config.sandbox.name, policy, outcomes, seconds), indent=1))
    else:
        print("", *summary(outcomes), f"{len(outcomes)} outcomes in {seconds:.0f} s.", sep="\n")
    return int(any(outcome.failure or (outcome.worked and not arguments.ablate) for outcome in outcomes))


async def _run(config: Config, attacks: tuple[Attack, ...], *, ablate: bool, quiet: bool) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="legorl-attack-") as name:
        directory = Path(name)
        os.chmod(directory, 0o755)  # noqa: PTH101  # as a run's directory: what hides it is the sandbox
        async with open_ground(directory) as ground:
            settings = suite_config(config, directory / "cache")
            rounds = [(frozenset[str](), list(attacks))]
            rounds += list(ablations(attacks, config.sandbox).items()) if ablate else []
            for off, some in rounds:
                async for outcome in run_attacks(settings, ground, some, off):
                    outcomes.append(outcome)
                    if not quiet:
                        print(line(outcome), flush=True)
    return outcomes

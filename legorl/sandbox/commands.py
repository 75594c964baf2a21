"""`legorl sandbox check` and `attack`: does a provider keep what a sandbox promises?"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import tempfile
from pathlib import Path

from legorl.attack.commands import add_attack, attack
from legorl.config.compose import compose
from legorl.config.schema import SandboxConfig
from legorl.sandbox.providers import open_provider
from legorl.sandbox.selfcheck import CheckResult, all_checks, run_checks


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sandbox` with its actions."""
    parser = subparsers.add_parser("sandbox", help="check what a sandbox provider keeps")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="run the self-check of a provider")
    check.add_argument(
        "overrides",
        nargs="*",
        metavar="sandbox=PROVIDER|NAME",
        help="the provider and its settings (local by default), and checks to run (all by default)",
    )
    check.add_argument("--list", action="store_true", help="list the checks and what each asks for")
    check.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_attack(actions)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run; the exit status is 1 when a check failed. Raises `UserError`."""
    if arguments.action == "attack":
        return asyncio.run(attack(arguments))
    if arguments.list:
        for name, function in all_checks().items():
            print(f"{name:32s} {function.__doc__}")
        return 0
    overrides = [word for word in arguments.overrides if "=" in word]
    names = [word for word in arguments.overrides if "=" not in word]
    return asyncio.run(_check(compose(overrides).sandbox, names, arguments.json))


async def _check(config: SandboxConfig, names: list[str], as_json: bool) -> int:
    provider = open_provider(config)
    if not as_json:
        print(f"Sandbox {provider.name}, policy {provider.policy.name}; limits by {provider.limits_by}.")
    results: list[CheckResult] = []
    with tempfile.TemporaryDirectory(prefix="legorl-check-") as directory:
        try:
            async for result in run_checks(provider, Path(directory), names):
                results.append(result)
                if not as_json:
                    _print(result)
        finally:
            await provider.close()
    failed = sum(bool(result.failure) for result in results)
    if as_json:
        checks = [dataclasses.asdict(result) for result in results]
        print(json.dumps({"sandbox": provider.name, "limits_by": provider.limits_by, "checks": checks}))
    else:
        print(f"{failed} failed." if failed else "All passed.")
    return int(failed > 0)


def _print(result: CheckResult) -> None:
    print(f"{'FAILED' if result.failure else 'ok':6s} {result.name} ({result.seconds:.2f} s)", flush=True)
    if result.failure:
        print(f"       {result.failure}")

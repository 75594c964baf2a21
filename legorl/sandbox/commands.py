"""`legorl sandbox check`: does this machine keep what the sandbox promises?"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import tempfile
from pathlib import Path

from legorl.sandbox.local import LocalProvider
from legorl.sandbox.selfcheck import CheckResult, all_checks, run_checks


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sandbox` with its actions."""
    parser = subparsers.add_parser("sandbox", help="check the sandbox on this machine")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="run the self-check of the local sandbox")
    check.add_argument("names", nargs="*", metavar="NAME", help="checks to run; all by default")
    check.add_argument("--list", action="store_true", help="list the checks and what each asks for")
    check.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run; the exit status is 1 when a check failed. Raises `UserError`."""
    if arguments.list:
        for name, function in all_checks().items():
            print(f"{name:32s} {function.__doc__}")
        return 0
    return asyncio.run(_check(arguments.names, arguments.json))


async def _check(names: list[str], as_json: bool) -> int:
    provider = LocalProvider()
    if not as_json:
        print(f"Local sandbox; limits by {provider.limits_by}.")
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

"""`legorl harness list|install`: the runtimes in the cache."""

from __future__ import annotations

import argparse
from pathlib import Path

from legorl.config.schema import HarnessConfig
from legorl.errors import UserError
from legorl.harness.registry import HARNESSES, get_harness


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `legorl`."""
    parser = subparsers.add_parser("harness", help="list and install the agent programs")
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser(
        "list", help="harnesses, their pinned versions, and whether they are installed"
    )
    installing = actions.add_parser("install", help="install harnesses into the cache")
    installing.add_argument("names", nargs="+", metavar="NAME", help="a harness, or `all`")
    for action in (listing, installing):
        action.add_argument("--cache", type=Path, default=Path(".cache/legorl"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code. Raises `UserError`."""
    if args.action == "list":
        for name in HARNESSES:
            print(_line(name, args.cache))
        return 0
    names = list(HARNESSES) if args.names == ["all"] else args.names
    for harness in [get_harness(HarnessConfig(name=name)) for name in names]:
        print(f"{harness.name} {harness.version}: {harness.install(args.cache)}")
    return 0


def _line(name: str, cache: Path) -> str:
    harness = get_harness(HarnessConfig(name=name))
    try:
        place = str(harness.mounts(cache)[0].source)
    except UserError:
        place = "not installed"
    return f"{name:<16} {harness.version:<10} {harness.wire:<16} {place}"

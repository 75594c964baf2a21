"""`legorl harness list|install`: the runtimes in the cache."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
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
    listing.add_argument("--json", action="store_true", help="as a list of objects")
    installing = actions.add_parser("install", help="install harnesses into the cache")
    installing.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="a harness, `all`, or one of your own as package.module:Class",
    )
    for action in (listing, installing):
        action.add_argument("--cache", type=Path, default=Path(".cache/legorl"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code. Raises `UserError`."""
    if args.action == "list":
        known = [_listed(name, args.cache) for name in HARNESSES]
        print(json.dumps([asdict(each) for each in known], indent=1) if args.json else _table(known))
        return 0
    names = list(HARNESSES) if args.names == ["all"] else args.names
    failures = []
    for harness in [get_harness(_asked_for(name)) for name in names]:
        try:
            print(f"{harness.name} {harness.version}: {harness.install(args.cache)}", flush=True)
        except UserError as error:  # the others can be installed all the same
            failures.append(str(error))
    if failures:
        raise UserError("\n".join(failures))
    return 0


def _asked_for(name: str) -> HarnessConfig:
    return HarnessConfig(name=name, target=name if ":" in name else "")


@dataclass(frozen=True)
class _Listed:
    """What `list` says of a harness; `path` is null where it is not installed."""

    name: str
    version: str
    wire: str
    path: str | None


def _listed(name: str, cache: Path) -> _Listed:
    harness = get_harness(HarnessConfig(name=name))
    try:
        path = str(harness.mounts(cache)[0].source)
    except UserError:
        path = None
    return _Listed(harness.name, harness.version, harness.wire.value, path)


def _table(known: list[_Listed]) -> str:
    return "\n".join(f"{h.name:<16} {h.version:<10} {h.wire:<17} {h.path or 'not installed'}" for h in known)

"""The attacks: `attacks/RULE.yaml` holds those that a rule of the integrity policy has to stop.

Invariant: an attack is data (what is tried, in words; a shell script that tries it) and names no provider, so
the same table is run everywhere; where something else than the rule stops it too, the table says what.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from legorl.errors import UserError
from legorl.sandbox.policy import REQUIRED

DIRECTORY = Path(__file__).parent / "attacks"


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    what: str
    run: str
    also_off: list[str] = []
    held: dict[str, str] = {}
    only_with_rule: str = ""
    shared: bool = False


@dataclass(frozen=True)
class Attack:
    """One attack. `id` is `RULE/NAME`."""

    id: str
    rule: str
    what: str
    run: str
    """Shell script that the malicious agent runs; words in it are replaced by nothing, it reads variables."""
    also_off: frozenset[str] = frozenset()
    """Rules that stop it as well, and are switched off with its own to show that it works."""
    held: Mapping[str, str] = field(default_factory=dict)
    """Provider, or `all` -> what stops it with the rule off."""
    only_with_rule: str = ""
    """Why it is never run with the rule off; empty when it is."""
    shared: bool = False
    """It only looks, so that others of its rule may be made in the same trial."""

    def held_by(self, provider: str) -> str:
        """What stops it on this provider with the rule off; empty for nothing."""
        return self.held.get(provider) or self.held.get("all", "")


@cache
def attacks() -> tuple[Attack, ...]:
    """All of them, by rule and in the order of the files."""
    found = []
    for rule in sorted(REQUIRED):
        table = msgspec.yaml.decode((DIRECTORY / f"{rule}.yaml").read_bytes(), type=dict[str, _Entry])
        found += [
            Attack(
                f"{rule}/{name}",
                rule,
                e.what,
                e.run,
                frozenset(e.also_off),
                e.held,
                e.only_with_rule,
                e.shared,
            )
            for name, e in table.items()
        ]
    return tuple(found)


def chosen(rules: list[str]) -> tuple[Attack, ...]:
    """Attacks of some rules, or single ones by id; all for an empty list.

    Raises:
        UserError: there is no such rule or attack.
    """
    if not rules:
        return attacks()
    known = sorted({attack.rule for attack in attacks()} | {attack.id for attack in attacks()})
    for name in rules:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(f"There is no rule and no attack {name!r}.{hint} `--list` shows all.")
    return tuple(attack for attack in attacks() if attack.rule in rules or attack.id in rules)

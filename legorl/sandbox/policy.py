"""The integrity policy: a YAML file of rules that reads as a specification, and the switches set for a run.

Invariant (I6): a rule holds unless a run's configuration names it in `sandbox.policy_off`; what is switched
off is part of the policy's hash, so two runs with one hash were graded under the same rules.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import msgspec

from legorl.errors import UserError

DEFAULT = "strict"


@dataclass(frozen=True)
class Rule:
    """One rule of a policy."""

    attack: str
    """What it stops."""
    phases: tuple[Literal["setup", "agent", "verify"], ...]
    """When it holds; at least one."""
    enforced: Mapping[Literal["all", "local", "docker", "kubernetes", "harbor"], str]
    """Provider, or `all`, -> how."""
    without: str = ""
    """What a run gets that switches it off."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    rules: dict[str, Rule]


@dataclass(frozen=True)
class Policy:
    """Rules by id, and which of them are off."""

    name: str
    rules: Mapping[str, Rule]
    off: frozenset[str] = frozenset()

    def holds(self, rule: str) -> bool:
        """Whether the rule is to be applied; `KeyError` for an id that no rule has."""
        self.rules[rule]
        return rule not in self.off

    def summary(self) -> dict[str, str | list[str]]:
        """What is logged of it: name, hash, and the rules that are off."""
        return {"name": self.name, "hash": self.hash, "off": sorted(self.off)}

    @property
    def hash(self) -> str:
        """Of the rules and the switches; 16 hexadecimal digits."""
        content = json.dumps([msgspec.to_builtins(dict(self.rules)), sorted(self.off)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def load_policy(name: str = DEFAULT, off: Iterable[str] = ()) -> Policy:
    """Read a policy.

    Args:
        name: of a packaged policy, or the path of a YAML file.
        off: ids of rules to switch off.

    Raises:
        UserError: there is no such policy or rule, or the file is wrong.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else _packaged() / f"{name}.yaml"
    try:
        rules = msgspec.yaml.decode(path.read_bytes(), type=_File).rules
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in _packaged().glob("*.yaml")))
        raise UserError(
            f"sandbox.policy={name}: {path} cannot be read ({error.strerror}). Packaged policies: {known}."
        ) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise UserError(f"sandbox.policy={name}: {path} is no policy: {error}") from error
    if never := [id for id, rule in rules.items() if not rule.phases]:
        raise UserError(f"sandbox.policy={name}: {path}: the rule {never[0]} has no phase to hold in.")
    if missing := sorted(REQUIRED - set(rules)):
        raise UserError(
            f"sandbox.policy={name}: {path} lacks the rule {missing[0]}; sandbox.policy_off switches one off."
        )
    if unknown := sorted(set(off) - set(rules)):
        near = difflib.get_close_matches(unknown[0], rules, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"sandbox.policy_off names no rule {unknown[0]!r}.{hint} Rules: {', '.join(rules)}.")
    return Policy(name, rules, frozenset(off))


def _packaged() -> Path:
    return Path(import_module("legorl.conf").__path__[0]) / "sandbox" / "policy"


REQUIRED = frozenset(
    {
        "host_invisible",
        "runtime_read_only",
        "history_sealed",
        "answers_absent",
        "reward_from_verifier",
        "tests_restored",
        "processes_ended",
        "fresh_grading",
        "network_closed",
        "no_credentials",
        "no_privileges",
        "limits",
    }
)
"""Rules that code applies; a policy that does not say what they are for is refused."""

"""What the attack suite found, as lines, as JSON, and as the table of the documentation."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from legorl.attack.catalog import Attack
from legorl.attack.suite import CONTROL, Outcome
from legorl.sandbox.policy import Policy


def line(outcome: Outcome) -> str:
    """One outcome."""
    if outcome.failure:
        state = "FAILED"
    elif outcome.expected:
        state = "works"
    else:
        state = "stopped" if outcome.attack != CONTROL else "solved"
    off = f" without {', '.join(outcome.off)}" if outcome.off else ""
    text = f"{state:8s}{outcome.attack}{off} ({outcome.seconds:.1f} s)"
    if outcome.failure:
        return f"{text}\n        {outcome.failure}"
    if outcome.expected:
        return f"{text}: {outcome.worked}"
    if outcome.held and outcome.rule in outcome.off:
        return f"{text}: by {outcome.held}"
    return text


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A table by rule."""
    attacks = [outcome for outcome in outcomes if outcome.attack != CONTROL]
    head = f"{'rule':22s}{'attacks':>8s}{'stopped':>9s}{'on record':>11s}{'work without it':>17s}"
    yield head
    for rule in sorted({outcome.rule for outcome in attacks}):
        own = [outcome for outcome in attacks if outcome.rule == rule]
        on = [outcome for outcome in own if rule not in outcome.off]
        off = [outcome for outcome in own if rule in outcome.off]
        worked = f"{sum(bool(o.worked) for o in off)} of {len(off)}" if off else "-"
        stopped, counted = sum(not o.worked for o in on), sum(bool(o.counted) for o in on)
        yield f"{rule:22s}{len(on):8d}{stopped:9d}{counted:11d}{worked:>17s}"
    failed = sum(bool(outcome.failure) for outcome in outcomes)
    held = [outcome for outcome in attacks if outcome.rule in outcome.off and outcome.held]
    if held:
        yield f"{len(held)} attacks are stopped by something else, too."
    yield f"{failed} failed." if failed else "All as it should be."


def to_json(provider: str, policy: Policy, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Everything, for programs."""
    rows = [{**dataclasses.asdict(outcome), "failure": outcome.failure} for outcome in outcomes]
    return {
        "sandbox": provider,
        "policy": policy.summary(),
        "seconds": round(seconds, 2),
        "failed": sum(bool(outcome.failure) for outcome in outcomes),
        "attacks": rows,
    }


def table(attacks: Sequence[Attack]) -> Iterator[str]:
    """The catalog in Markdown."""
    yield "| rule | attack | what it does | what else stops it |"
    yield "|---|---|---|---|"
    for attack in attacks:
        held = "; ".join(text if name == "all" else f"{name}: {text}" for name, text in attack.held.items())
        also = ", ".join(f"`{rule}`" for rule in sorted(attack.also_off))
        if attack.only_with_rule:
            held = f"never run without the rule: {attack.only_with_rule}"
        yield f"| `{attack.rule}` | `{attack.id.partition('/')[2]}` | {attack.what} | {also or held} |"


def counts(attacks: Sequence[Attack]) -> str:
    """How many there are of each rule."""
    return ", ".join(f"{rule} {number}" for rule, number in Counter(a.rule for a in attacks).items())

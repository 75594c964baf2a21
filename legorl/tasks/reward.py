"""What a verifier's reward files say, as Harbor has them: `reward.json`, numbers by name, or `reward.txt`.

Invariant (I6): only a finite number from 0 to 1 is a reward; anything else is none, not the nearest one.
"""

from __future__ import annotations

import json
import re
import statistics

_NUMBER = re.compile(r"[+-]?\d{1,20}(\.\d{0,40})?([eE][+-]?\d{1,4})?|[+-]?\.\d{1,40}", re.ASCII)
_KEY = "reward"


def reward_in(text: str) -> float | None:
    """The number in a `reward.txt`, None for one that is none, is not finite or lies outside of 0 to 1."""
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if 0.0 <= number <= 1.0 else None


def stated_reward(text: str, json_text: str) -> float | None:
    """The reward that the two files state; empty for one that is not there.

    Of several numbers in `reward.json` it is the one called `reward`, or else their mean.
    """
    if not json_text.strip():
        return reward_in(text.strip())
    try:
        values = json.loads(json_text)
        numbers = {str(name): reward_in(json.dumps(value)) for name, value in dict(values).items()}
    except (ValueError, TypeError, RecursionError):
        return None
    if _KEY in numbers:
        return numbers[_KEY]
    known = [number for number in numbers.values() if number is not None]
    return statistics.fmean(known) if known and len(known) == len(numbers) else None

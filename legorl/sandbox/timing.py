"""How long each operation of the sandboxes took, and what failed.

Invariant: bounded in memory, whatever the length of a run: counts are of everything, quantiles of the last
thousand.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from legorl.errors import InfrastructureError

_KEPT = 1000


@dataclass(frozen=True)
class OperationStats:
    """One operation in numbers."""

    count: int
    """Failed ones included."""
    p50_s: float
    p99_s: float
    failures: dict[str, int]
    """By cause."""


@dataclass
class _Operation:
    count: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    failures: Counter[str] = field(default_factory=Counter)


class Timings:
    """See the module."""

    def __init__(self) -> None:
        self._operations: dict[str, _Operation] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time what happens within; an `InfrastructureError` counts as a failure of its cause."""
        start = time.monotonic()
        try:
            yield
        except InfrastructureError as error:
            self.add(name, time.monotonic() - start, error.cause)
            raise
        self.add(name, time.monotonic() - start)

    def add(self, name: str, seconds: float, cause: str = "") -> None:
        """Count one operation; `cause` says why it failed."""
        operation = self._operations.setdefault(name, _Operation())
        operation.count += 1
        operation.seconds.append(seconds)
        if cause:
            operation.failures[cause] += 1

    def stats(self) -> dict[str, OperationStats]:
        """By operation, in the order of their first use."""
        return {
            name: OperationStats(
                each.count, quantile(each.seconds, 0.5), quantile(each.seconds, 0.99), dict(each.failures)
            )
            for name, each in self._operations.items()
        }


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least `share` of the values do not exceed. `values` is not empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]

"""When a step has nothing to train on, and whose fault that is.

Invariant (I5): a step whose sandboxes failed is an outage and never a result of the policy: it ends the run
with the causes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from legorl.errors import OutageError
from legorl.trial.record import TrialRecord
from legorl.trial.termination import RETRIED

_SANDBOXES = RETRIED | {"image", OutageError.cause}
"""Causes that lie in where trials run. A dead engine is its watchdog's to report."""


class NothingToTrainError(RuntimeError):
    """Every trial of a step was excluded: something around the policy is broken."""


def stop_at_outage(records: Sequence[TrialRecord]) -> None:
    """Raises `OutageError` when a trial says that the breaker has given up."""
    for record in records:
        if record.termination == OutageError.cause:
            raise OutageError(record.detail)


def nothing_left(records: Sequence[TrialRecord], what: str) -> Exception:
    """The error for trials that were all excluded; `what` they are."""
    causes = Counter(record.termination for record in records)
    named = ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
    detail = next((record.detail for record in records if record.detail), "none")
    message = f"All {len(records)} {what} were excluded ({named}). First detail: {detail}"
    return OutageError(message) if set(causes) <= _SANDBOXES else NothingToTrainError(message)

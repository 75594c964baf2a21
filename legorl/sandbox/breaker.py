"""Stops a run whose infrastructure is down, so that a dead registry never looks like a weak policy.

    closed ── rate of failures above the bound ──► open ── pause ──► half open ── a start works ──► closed
                                                     ▲                   └─ it fails ─► open
                                                     └── after so many pauses in a row: broken, for good

Invariant: while it is not closed nobody starts but one probe at a time; once broken, every start raises
`OutageError` with the causes. A full window without another opening forgets the pauses before it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable

from legorl.config.schema import PoolConfig
from legorl.errors import OutageError


class Breaker:
    """See the module. Use it from one event loop."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._recent: deque[str] = deque(maxlen=config.breaker_window)
        """Causes of the last phases, empty for one that went well."""
        self._last_words: dict[str, str] = {}
        """Cause -> message of its last failure."""
        self._causes: Counter[str] = Counter()
        self._healthy = 0
        self._pauses = 0
        self._opens_until: float | None = None
        self._probing = False
        self._broken = ""
        self._changed = asyncio.Event()
        self.tell: Callable[[str], None] = lambda text: None
        """Called with a sentence when it opens and when it closes again."""

    @property
    def state(self) -> str:
        """`closed`, `open`, `half open` or `broken`."""
        if self._broken:
            return "broken"
        if self._opens_until is None:
            return "closed"
        return "half open" if self._probing else "open"

    async def admit(self) -> bool:
        """Wait until a sandbox may be started; True for a probe, whose caller owes `probed`.

        Raises:
            OutageError: broken.
        """
        while True:
            if self._broken:
                raise OutageError(self._broken)
            if self._opens_until is None:
                return False
            left = self._opens_until - time.monotonic()
            if left <= 0 and not self._probing:
                self._probing = True
                return True
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), left if left > 0 else None)
            except TimeoutError:
                continue

    def report(self, cause: str, detail: str = "") -> None:
        """How a phase of a trial went: an infrastructure cause, or empty."""
        if cause:
            self._last_words[cause] = detail
        if self.state != "closed":
            return  # begun before it opened: says nothing new
        self._recent.append(cause)
        self._healthy = 0 if cause else self._healthy + 1
        if self._healthy >= self._config.breaker_window:
            self._pauses = 0
        failed = [each for each in self._recent if each]
        full = len(self._recent) == self._config.breaker_window
        if full and len(failed) / len(self._recent) > self._config.breaker_rate:
            self._causes = Counter(failed)
            self._recent.clear()
            self._open()

    def probed(self, works: bool | None, cause: str = "", detail: str = "") -> None:
        """What became of a probe; None for one that was given up."""
        self._probing = False
        if works:
            self._opens_until = None
            self._notify()
            self.tell("A sandbox started again: the pause is over.")
        elif works is None:
            self._notify()
        else:
            self._last_words[cause] = detail
            self._causes[cause] += 1
            self._open()

    def _open(self) -> None:
        self._pauses += 1
        if self._pauses > self._config.breaker_probes:
            self._broken = self._message()
        else:
            self._opens_until = time.monotonic() + self._config.breaker_pause_s
            self.tell(
                f"Infrastructure fails ({self._worst()}): no sandbox is started for "
                f"{self._config.breaker_pause_s:g} s (pause {self._pauses} of {self._config.breaker_probes})."
            )
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _message(self) -> str:
        causes = ", ".join(f"{cause} {count}" for cause, count in self._causes.most_common())
        return (
            f"Infrastructure fails: {causes} of the last {self._config.breaker_window} phases of trials, and "
            f"{self._config.breaker_probes} pauses of {self._config.breaker_pause_s:g} s did not help. "
            f"The last {self._worst()} Mend that and start again; sandbox.pool.breaker_rate is the bound."
        )

    def _worst(self) -> str:
        worst = self._causes.most_common(1)[0][0]
        return f"{worst}: {self._last_words.get(worst, '')}"

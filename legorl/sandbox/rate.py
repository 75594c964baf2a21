"""A token bucket: so many starts per second on average, a second's worth of them at once.

Invariant: callers are served in the order in which they came.
"""

from __future__ import annotations

import asyncio
import time


class RateLimit:
    """See the module."""

    def __init__(self, per_s: float) -> None:
        """`per_s`: 0 for no limit."""
        self._per_s = per_s
        self._burst = max(1.0, per_s)
        self._tokens = self._burst
        self._filled = time.monotonic()
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Wait for a token."""
        if not self._per_s:
            return
        async with self._turn:
            self._fill()
            if self._tokens < 1:
                await asyncio.sleep((1 - self._tokens) / self._per_s)
                self._fill()
            self._tokens -= 1

    def _fill(self) -> None:
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._per_s)
        self._filled = now

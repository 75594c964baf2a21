"""Requests in flight on an engine: each has a deadline, and each can be stopped by its id.

Invariant: when `run` is left, by whatever way, the work has ended (or ignored its cancellation for
`STOP_TIMEOUT_S`). What ends it early is a cancellation, on which it must stop the engine too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from legorl.errors import EngineError

T = TypeVar("T")
STOP_TIMEOUT_S = 10.0
"""Time that work has to end after its cancellation."""


class Calls:
    """See the module. `name` says which engine in messages."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._aborted: set[str] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    async def run(self, request_id: str, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None when `abort` or `close` ended it.

        Raises:
            EngineError: the id is in flight already, the engine is closed, or the deadline passed.
        """
        if self._closed or request_id in self._running:
            work.close()
            why = "is closed" if self._closed else "has a request of that id already"
            raise EngineError(f"{self._name} {why}: request {request_id} was not sent.")
        task: asyncio.Task[T] = asyncio.create_task(work, name=request_id)
        self._running[request_id] = task
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
            if not done:
                raise EngineError(
                    f"{self._name} did not answer request {request_id} within {self._timeout_s:g} s. It "
                    "hangs or has too much to do: look at its log, raise engine.request_timeout_s or lower "
                    "sandbox.concurrency."
                )
            if task.cancelled():
                if request_id in self._aborted:
                    return None
                raise EngineError(f"{self._name} gave request {request_id} up without saying why.")
            return task.result()
        finally:
            try:
                await _stop(task)
            finally:
                del self._running[request_id]
                self._aborted.discard(request_id)

    async def abort(self, request_id: str) -> None:
        """Stop a request and wait until it has ended; unknown ids are fine."""
        task = self._running.get(request_id)
        if task is not None:
            self._aborted.add(request_id)
            await _stop(task)

    async def close(self) -> None:
        """Stop all of them; none can follow."""
        self._closed = True
        await asyncio.gather(*(self.abort(request_id) for request_id in list(self._running)))


async def _stop(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
    if task.done() and not task.cancelled():
        task.exception()  # seen here, in case nobody waits for it any more

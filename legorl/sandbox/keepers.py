"""The host's side of the keepers of one sandbox: each runs one command at a time.

Invariant: whatever becomes of a keeper (killed or stopped by a command, abandoned by its caller), `run`
returns or raises within its deadline, and no process of its command is left.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import Any

from legorl.sandbox.link import Link, LinkClosedError

_GRACE_S = 5.0
"""A deadline that a keeper enforces is given up on this much later."""
_END_S = 5.0
_ATTEMPTS = 3


class Keepers:
    """Keepers are made when they are needed and used again."""

    def __init__(self, supervisor: Link) -> None:
        self._supervisor = supervisor
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._ended: set[Link] = set()
        """Busy ones that `end_everything` kills, so that their end does not end everything once more."""
        self._ending = asyncio.Lock()

    async def run(self, message: dict[str, Any], fds: list[int], timeout_s: float) -> dict[str, Any]:
        """Have a keeper run a command; its answer.

        A command that killed its keeper counts as killed, one that stopped it as out of time; either costs
        the sandbox all its processes.

        Raises:
            LinkClosedError: the sandbox is gone.
            TimeoutError: what the command left could not be ended.
            channel.MessageTooLargeError: nothing was run.
        """
        keeper = await self._acquire()
        try:
            answer, _ = await keeper.request(message, fds, timeout_s=timeout_s + _GRACE_S)
        except LinkClosedError:
            deliberate = keeper in self._ended
            self._discard(keeper)
            if deliberate:
                async with self._ending:
                    pass  # until everything has ended
            else:
                await self._end_or_raise()
            return {"code": 128 + signal.SIGKILL, "timed_out": False, "seconds": 0.0}
        except TimeoutError:
            self._discard(keeper)
            await self._end_or_raise()
            return {"code": 124, "timed_out": True, "seconds": timeout_s}
        except BaseException:
            self._discard(keeper)  # it ends its command
            raise
        self._busy.discard(keeper)
        self._idle.append(keeper)
        if answer.get("tree_gone") is False:
            await self._end_or_raise()
        return answer

    async def end_everything(self) -> bool:
        """End every process of the sandbox but its init; True when none was left.

        Raises:
            LinkClosedError: the sandbox is gone.
            TimeoutError: no answer.
        """
        async with self._ending:
            self._ended |= self._busy
            request = {"op": "end_others", "timeout_s": _END_S}
            for attempt in range(_ATTEMPTS):
                keeper = await self._acquire()
                try:
                    answer, _ = await keeper.request(request, [], timeout_s=_END_S + _GRACE_S)
                except LinkClosedError:
                    self._discard(keeper)  # killed by what it was about to kill
                    if attempt == _ATTEMPTS - 1:
                        raise
                except BaseException:
                    self._discard(keeper)
                    raise
                else:
                    break
            self._busy.discard(keeper)
            for other in self._idle:
                other.drop()  # they were killed too
            self._idle = [keeper]
            return bool(answer["alone"])

    def close(self) -> None:
        """Drop all; each ends, and its command with it."""
        for keeper in (*self._idle, *self._busy):
            keeper.drop()

    async def _end_or_raise(self) -> None:
        if not await self.end_everything():
            raise TimeoutError("processes survived being killed")

    async def _acquire(self) -> Link:
        while self._idle:
            keeper = self._idle.pop()
            if keeper.alive():
                self._busy.add(keeper)
                return keeper
            keeper.drop()
        answer, fds = await self._supervisor.request({"op": "keeper"}, [], timeout_s=_GRACE_S)
        if "error" in answer:
            raise LinkClosedError(f"no process could be started in the sandbox: {answer['error']}")
        keeper = Link(socket.socket(fileno=fds[0]))
        self._busy.add(keeper)
        return keeper

    def _discard(self, keeper: Link) -> None:
        self._busy.discard(keeper)
        self._ended.discard(keeper)
        keeper.drop()

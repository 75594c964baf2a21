"""The host's end of the socket of a supervisor or keeper: requests with deadlines in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Sequence
from typing import Any

from legorl.sandbox import channel

Answer = tuple[dict[str, Any], list[int]]

_CLOSE_S = 10.0
_HELLO = 0


class LinkClosedError(Exception):
    """The supervisor is gone, or this end was closed."""


class Link:
    """Matches answers to requests. Descriptors in an answer belong to whoever awaited it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {_HELLO: self._loop.create_future()}
        self._gone = asyncio.Event()
        self._loop.add_reader(sock, self._read)

    @property
    def closed(self) -> bool:
        """The other end is gone."""
        return self._gone.is_set()

    def alive(self) -> bool:
        """The other end is there, as of now: `closed` may lag behind by one turn of the loop."""
        try:
            return not self.closed and self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def hello(self) -> Answer:
        """The supervisor's first message."""
        return await self._waiting[_HELLO]

    async def request(self, message: dict[str, Any], fds: Sequence[int], *, timeout_s: float) -> Answer:
        """Send a request and wait for its answer.

        Args:
            message: without `id`.
            fds: sent along; the caller keeps its own copies.
            timeout_s: for everything.

        Raises:
            LinkClosedError: the supervisor is gone.
            TimeoutError: no answer in time.
            channel.MessageTooLargeError: nothing was sent.
        """
        identifier = next(self._ids)
        data = channel.encode({"id": identifier, **message})
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[identifier] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(data, fds)
                return await future
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout_s} s") from None
        finally:
            self._waiting.pop(identifier, None)

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        while True:
            if self._gone.is_set():
                raise LinkClosedError("the sandbox is gone")
            try:
                channel.send(self._sock, data, fds)
            except BlockingIOError:
                await asyncio.sleep(0.005)  # its queue is full for a moment
            except OSError as error:
                raise LinkClosedError(f"the sandbox is gone ({error.strerror})") from error
            else:
                return

    def _read(self) -> None:
        try:
            received = channel.receive(self._sock)
        except BlockingIOError:
            return
        except OSError:
            received = None
        if received is None:
            self._end()
            return
        message, fds = received
        future = self._waiting.get(message.get("id", _HELLO))
        if future is None or future.done():
            for fd in fds:
                os.close(fd)
        else:
            future.set_result((message, fds))

    def _end(self) -> None:
        self._gone.set()
        self._loop.remove_reader(self._sock)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LinkClosedError("the sandbox is gone"))
                future.exception()  # nobody may be waiting

    def drop(self) -> None:
        """Close this end at once."""
        if not self._gone.is_set():
            self._end()
        self._sock.close()

    async def close(self) -> bool:
        """End the sandbox; True when all its processes are gone, False when it did not obey."""
        try:
            if not self._gone.is_set():
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), _CLOSE_S)
            return self._gone.is_set()
        finally:
            self.drop()

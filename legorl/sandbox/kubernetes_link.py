"""A provider's connection to the guard of one pod: requests with deadlines over the websocket of an exec.

Invariant: when the connection ends, every request fails at once with the reason: the close code, what the
guard wrote to its standard error, the API server's status.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from legorl.sandbox.pod_wire import Body, Frame, Kind, Parser, WireError, checksum, chunks, encode

_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
_BEAT_S = 5.0
_STDERR_BYTES = 3000
_CLOSE_S = 5.0


class LinkLostError(Exception):
    """The guard cannot be reached any more."""


class GuardError(Exception):
    """The guard answered that it could not; `kind` is the name of its error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Reply:
    """An answer."""

    message: dict[str, Any] = field(default_factory=dict)
    body: Body = field(default_factory=Body)


class PodLink:
    """Requests to one guard. Owns the websocket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._streams = itertools.count(1)
        self._waiting: dict[int, tuple[Reply, asyncio.Future[Reply]]] = {}
        self._errors = b""
        self._lost = ""
        self._tasks = [asyncio.create_task(self._read())]

    @property
    def lost(self) -> str:
        """Why the connection is gone; empty while it is there."""
        return self._lost

    async def send_program(self, program: bytes) -> None:
        """What the command itself reads, before any frame."""
        for piece in chunks(program):
            await self._send(piece)
        self._tasks.append(asyncio.create_task(self._beat()))

    async def request(
        self, message: dict[str, Any], data: bytes | AsyncIterable[bytes] = b"", *, timeout_s: float
    ) -> Reply:
        """Send a request and wait for its answer.

        Args:
            message: has `op`.
            data: sent along.
            timeout_s: for everything.

        Raises:
            LinkLostError: the connection is gone.
            TimeoutError: no answer in time; the guard gives up on the request.
            GuardError: the guard could not.
        """
        stream = next(self._streams)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[stream] = Reply(), future
        done = False
        try:
            async with asyncio.timeout(timeout_s):
                if self._lost:
                    raise LinkLostError(self._lost)
                await self._send(encode(Kind.OPEN, stream, message))
                if isinstance(data, bytes):
                    for piece in chunks(data):
                        await self._send(encode(Kind.DATA, stream, piece))
                    await self._send(encode(Kind.END, stream, {"sha256": checksum(data)}))
                else:
                    await self._stream(stream, data)
                reply = await future
            done = True
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(stream, None)
            if not done and not self._lost and not self._socket.closed:
                with contextlib.suppress(LinkLostError, asyncio.CancelledError):
                    await self._send(encode(Kind.CANCEL, stream))
        if "error" in reply.message:
            raise GuardError(reply.message["error"], reply.message["message"])
        return reply

    async def _stream(self, stream: int, data: AsyncIterable[bytes]) -> None:
        body = Body()
        async for piece in data:
            body.add(Frame(Kind.DATA, stream, piece))
            body.data.clear()
            await self._send(encode(Kind.DATA, stream, piece))
        await self._send(encode(Kind.END, stream, {"sha256": body.sha256}))

    async def _send(self, data: bytes) -> None:
        try:
            await self._socket.send_bytes(bytes([_STDIN]) + data)
        except (aiohttp.ClientError, OSError) as error:
            self._end(f"the connection to the pod broke: {error or type(error).__name__}")
            raise LinkLostError(self._lost) from error

    async def _read(self) -> None:
        parser, reason = Parser(), "the connection to the pod was closed"
        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    continue
                channel, data = message.data[0], message.data[1:]
                if channel == _STDOUT:
                    for frame in parser.feed(data):
                        self._take(frame)
                elif channel == _STDERR:
                    self._errors = (self._errors + data)[-_STDERR_BYTES:]
                elif channel == _STATUS:
                    reason = f"the guard ended: {_status(data)}"
            if (error := self._socket.exception()) is not None:
                reason = f"the connection to the pod broke: {error}"
            elif self._socket.close_code not in (None, aiohttp.WSCloseCode.OK):
                reason += f" (code {self._socket.close_code})"
        except (aiohttp.ClientError, OSError, WireError) as error:
            reason = f"the connection to the pod broke: {error or type(error).__name__}"
        finally:
            self._end(reason)

    def _take(self, frame: Frame) -> None:
        if (waiting := self._waiting.get(frame.stream)) is None:
            return
        reply, future = waiting
        if frame.kind is not Kind.END:
            reply.body.add(frame)
            return
        reply.message = frame.message
        reply.body.check(reply.message)
        if not future.done():
            future.set_result(reply)

    def _end(self, reason: str) -> None:
        if self._lost:
            return
        said = self._errors.decode(errors="replace").strip()
        self._lost = f"{reason}; it said: {said}" if said else reason
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(LinkLostError(self._lost))
                future.exception()  # nobody may be waiting

    async def _beat(self) -> None:
        """The guard ends its pod when it hears nothing."""
        with contextlib.suppress(LinkLostError):
            while not self._lost:
                await self._send(encode(Kind.BEAT, 0))
                await asyncio.sleep(_BEAT_S)

    async def close(self) -> None:
        """Hang up, which ends the guard."""
        self._end("the sandbox was stopped")
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(_CLOSE_S):
                await self._socket.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _status(data: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError):
        status = json.loads(data)
        return str(status.get("message") or status["status"])
    return data.decode(errors="replace")

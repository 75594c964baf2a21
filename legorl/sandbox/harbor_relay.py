"""The host's end of `inside/relay.py`: keeps it running in the agent phase and moves its bytes.

Invariant: when the relay ends, whoever ended it, the proxy's connections end and another one takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from legorl.sandbox.inside.frames import Decoder, Frame
from legorl.sandbox.link import LinkClosedError

_WAIT_S = 10.0
"""A poll returns after this long with nothing."""
_LIFETIME_S = 6 * 3600.0
_CALL_S = 20.0
_FEED_BYTES = 1 << 20
_STEP_S = 0.05
_MOST_S = 2.0
_SERIALS = 1_000_000
"""Numbers of connections of one relay."""


class NoAnswerError(Exception):
    """The command ended without an answer: it was killed, or stopped."""


class Commands(Protocol):
    """What runs the relay's commands."""

    tunnel: Callable[[dict[str, Any], bytes], None]

    async def call(self, header: dict[str, Any], payload: bytes = b"", *, timeout_s: float) -> Frame:
        """One command. Raises `NoAnswerError`, `LinkClosedError`, `TimeoutError`."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something until it ends or everything does."""


class RelayEnd:
    """One port of one sandbox."""

    def __init__(self, link: Commands, port: int) -> None:
        self._link = link
        self._port = port
        self._socket = ""
        self._generation = 0
        self._open: set[int] = set()
        """Connections of the running relay."""
        self._out = bytearray()
        self._sent = 0
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Returns when the port can be reached. Raises `LinkClosedError`."""
        self._task = self._link.spawn(self._keep())
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not self._ready.is_set():
            self._task.result()
            raise LinkClosedError("the relay of the proxy's port did not start")

    async def close(self) -> None:
        """Close the port and its connections."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def send(self, frame: bytes) -> None:
        """Bytes for the relay."""
        self._out += frame
        self._wake.set()

    async def _keep(self) -> None:
        """One relay after another: an agent that kills it kills its own way to the model for a moment."""
        while True:
            self._generation += 1
            self._socket = f"/tmp/.legorl-{secrets.token_hex(8)}"
            self._out.clear()
            self._sent = 0
            relay = asyncio.ensure_future(self._relay())
            others = [asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._feed())]
            try:
                await asyncio.wait({relay, *others}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (relay, *others):
                    task.cancel()
                results = await asyncio.gather(relay, *others, return_exceptions=True)
            if not self._ready.is_set():
                reason = next(
                    (str(item) for item in results if isinstance(item, LinkClosedError)), "it ended"
                )
                raise LinkClosedError(f"the relay of the proxy's port did not start: {reason}")
            for number in self._open:
                self._link.tunnel({"op": "gone", "tunnel": number}, b"")
            self._open.clear()
            await asyncio.sleep(min(_STEP_S * self._generation, _MOST_S))

    async def _relay(self) -> None:
        request = {
            "op": "relay",
            "socket": self._socket,
            "port": self._port,
            "first": self._generation * _SERIALS,
            "lifetime_s": _LIFETIME_S,
        }
        answer, _ = await self._link.call(request, timeout_s=_LIFETIME_S)
        raise LinkClosedError(str(answer.get("error", "its time was over")))

    async def _receive(self) -> None:
        decoder, offset, failures = Decoder(), 0, 0
        while True:
            request = {"op": "poll", "socket": self._socket, "offset": offset, "wait_s": _WAIT_S}
            if not self._ready.is_set():
                request["wait_s"] = 0.0
            answer, data = await self._ask(request)
            if "error" in answer:  # not there yet, or gone, of which its own command tells
                failures += 1
                if failures > _CALL_S / _STEP_S:
                    raise LinkClosedError(str(answer["error"]))
                await asyncio.sleep(_STEP_S)
                continue
            failures = 0
            self._ready.set()
            new = data[offset - answer["offset"] :]
            offset += len(new)
            for header, payload in decoder.feed(new):
                if header["op"] == "open":
                    self._open.add(header["tunnel"])
                elif header["op"] == "gone":
                    self._open.discard(header["tunnel"])
                self._link.tunnel(header, payload)

    async def _ask(self, request: dict[str, Any], payload: bytes = b"") -> Frame:
        """A command that the agent killed is run once more: bytes are numbered, so nothing is doubled."""
        while True:
            with contextlib.suppress(NoAnswerError):
                return await self._link.call(request, payload, timeout_s=_CALL_S)
            await asyncio.sleep(_STEP_S)

    async def _feed(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._out:
                piece = bytes(self._out[:_FEED_BYTES])
                request = {"op": "feed", "socket": self._socket, "offset": self._sent}
                answer, _ = await self._ask(request, piece)
                if "error" in answer:
                    raise LinkClosedError(str(answer["error"]))
                taken = answer["taken"] - self._sent
                del self._out[:taken]
                self._sent += taken

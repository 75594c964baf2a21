"""The host's end of the stream to PID 1 of a container (`inside/pid1.py`): requests with deadlines.

Invariant: one task reads, and never waits for anything but the stream, so answers and the proxy's traffic do
not hold one another up; when the stream ends, every request in flight fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

from legorl.sandbox.inside.frames import Decoder, Frame, encode
from legorl.sandbox.link import LinkClosedError

LEASE_S = 60.0
"""PID 1 ends itself when it has heard nothing for this long."""
_PING_S = 5.0
_PIECE = 1 << 16
_MODULES = (
    "linux",
    "seccomp",
    *(f"inside.{n}" for n in ("frames", "kept", "processes", "files", "tree", "commands")),
)
_MODULES += ("inside.tunnels", "inside.pid1")
_PACKAGE = "legorl.sandbox"
BOOTSTRAP = """
import json, os, sys, types
left, text = int(sys.argv[1]), b""
while left:
    piece = os.read(0, left)
    piece or os._exit(0)
    left -= len(piece); text += piece
for name, source in json.loads(text).items():
    module = sys.modules[name] = types.ModuleType(name)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    exec(compile(source, name, "exec"), module.__dict__)
sys.modules["legorl.sandbox.inside.pid1"].main(*json.loads(sys.argv[2]))
"""
"""Reads the modules from standard input, so that nothing of the host need be mounted."""


class Requests(Protocol):
    """What carries out requests inside a container."""

    tunnel: Callable[[dict[str, Any], bytes], None]
    """Gets the frames of the proxy's connections."""

    async def request(self, header: dict[str, Any], payload: bytes = b"", *, timeout_s: float) -> Frame:
        """Send a request and wait for its answer. Raises `LinkClosedError`, `TimeoutError`."""

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send a frame that has no answer, some time soon."""

    async def close(self) -> None:
        """End what carries them. May be called again."""


class ByteStream(Protocol):
    """Standard streams of PID 1, however they are carried."""

    async def read(self) -> bytes:
        """Some bytes of its output; none at the end."""

    async def write(self, data: bytes) -> None:
        """To its input. Raises `OSError` when it is gone."""

    async def close(self) -> None:
        """Both directions, which ends PID 1."""

    def diagnosis(self) -> str:
        """What it said on standard error."""


def sources() -> bytes:
    """The modules of PID 1, as `BOOTSTRAP` reads them."""
    texts = {"legorl": "", _PACKAGE: "", f"{_PACKAGE}.inside": ""}
    for name in _MODULES:
        module = importlib.import_module(f"{_PACKAGE}.{name}")
        assert module.__file__ is not None
        texts[module.__name__] = Path(module.__file__).read_text()
    return json.dumps(texts).encode()


def bootstrap(uid: int, gid: int, own: Sequence[str] = ()) -> list[str]:
    """Arguments of a Python that becomes PID 1; `InsideLink.start` sends it the rest.

    Args:
        own: directories to give to the agent first, where the engine cannot.
    """
    settings = json.dumps([uid, gid, LEASE_S, list(own)])
    return ["-I", "-S", "-X", "utf8", "-c", BOOTSTRAP, str(len(sources())), settings]


class InsideLink:
    """Requests, and frames of the proxy's connections, which go to `tunnel`."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self.tunnel: Callable[[dict[str, Any], bytes], None] = lambda header, payload: None
        self._ids = itertools.count(1)
        loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[Frame] = loop.create_future()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._writing = asyncio.Lock()
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Send PID 1 its program and wait until it runs.

        Raises:
            LinkClosedError: it ended; the message has its last words.
        """
        self.spawn(self._read())
        await self._write(sources())
        await self._hello
        self.spawn(self._ping())

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something until it ends or the link is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def request(self, header: dict[str, Any], payload: bytes = b"", *, timeout_s: float) -> Frame:
        """Send a request and wait for its answer; a caller that is cancelled aborts it.

        Raises:
            LinkClosedError: PID 1 is gone.
            TimeoutError: no answer in time.
        """
        identifier = next(self._ids)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        if self._closed:
            raise LinkClosedError("the sandbox is gone")
        self._waiting[identifier] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(encode({**header, "id": identifier}, payload))
                return await future
        except TimeoutError:
            self.send({"op": "abort", "request": identifier})
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.send({"op": "abort", "request": identifier})
            raise
        finally:
            self._waiting.pop(identifier, None)

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send a frame that has no answer, some time soon."""
        if not self._closed:
            self.spawn(self._send(encode(header, payload)))

    async def _send(self, data: bytes) -> None:
        with contextlib.suppress(LinkClosedError):
            await self._write_whole(data)

    async def _write(self, data: bytes) -> None:
        # Whoever is cancelled meanwhile, a frame that was begun is sent to its end.
        await asyncio.shield(self.spawn(self._write_whole(data)))

    async def _write_whole(self, data: bytes) -> None:
        async with self._writing:
            for start in range(0, len(data), _PIECE):
                if self._closed:
                    raise LinkClosedError("the sandbox is gone")
                try:
                    await self._stream.write(data[start : start + _PIECE])
                except OSError as error:
                    raise LinkClosedError(f"the sandbox is gone ({error})") from error

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            await self._send(encode({"op": "ping"}))

    async def _read(self) -> None:
        decoder, reason = Decoder(), ""
        try:
            while data := await self._stream.read():
                for header, payload in decoder.feed(data):
                    self._take(header, payload)
        except (OSError, ValueError) as error:
            reason = f" ({error})"
        finally:
            self._end(f"the sandbox is gone{reason}. {self._stream.diagnosis()}".strip())

    def _take(self, header: dict[str, Any], payload: bytes) -> None:
        if header.get("op") == "hello":
            self._hello.set_result((header, payload))
        elif "tunnel" in header:
            self.tunnel(header, payload)
        elif (future := self._waiting.get(header["id"])) is not None and not future.done():
            future.set_result((header, payload))

    def _end(self, reason: str) -> None:
        self._closed = True
        for future in (self._hello, *self._waiting.values()):
            if not future.done():
                future.set_exception(LinkClosedError(reason))
                future.exception()  # nobody may be waiting

    async def close(self) -> None:
        """End PID 1. May be called again."""
        self._end("the sandbox was stopped")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stream.close()

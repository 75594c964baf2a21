"""The host's end of requests to a sandbox that offers commands and files, but no stream: one command each.

Invariants: every request has a deadline, here and inside; what an environment says without our mark is no
answer; a command that was killed or stopped has no answer, and then every process of the agent's is ended.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import secrets
import shlex
import tempfile
import time
import zlib
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any

from legorl.sandbox.harbor_environment import Environment, Result
from legorl.sandbox.harbor_relay import NoAnswerError, RelayEnd
from legorl.sandbox.inside.frames import Decoder, Frame, encode
from legorl.sandbox.inside.once import MARK, digest
from legorl.sandbox.link import LinkClosedError

_MODULES = (
    "linux",
    "seccomp",
    *(
        f"inside.{name}"
        for name in (
            "frames",
            "kept",
            "processes",
            "ending",
            "files",
            "tree",
            "commands",
            "tunnels",
            "relay",
            "once",
        )
    ),
)
_PACKAGE = "legorl.sandbox"
_INLINE_BYTES = 48 << 10
"""A longer request is uploaded: Linux takes at most 128 KB as one argument, and the program is in it too."""
_GRACE_S = 10.0
"""An environment is given so much longer than the command itself."""
_END_S = 5.0
_LATER_S = 2
"""What runs inside keeps a command's deadline; the environment is to end it so much later."""
_BOOT = """
import base64, importlib.util, json, sys, zlib
texts = json.loads(zlib.decompress(base64.b64decode(sys.argv[1])))
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in texts:
            return importlib.util.spec_from_loader(name, self, is_package=not texts[name])
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(texts[module.__name__], module.__name__, "exec"), module.__dict__)
sys.meta_path.insert(0, Finder())
from legorl.sandbox.inside.once import main
main(sys.argv[2])
"""
"""Imports from the text beside it, and of that only what a request needs; `sys.argv[3]` names the request."""


@cache
def program() -> str:
    """Shell words that run `inside/once.py`, but for the request."""
    texts = {name: "" for name in ("legorl", _PACKAGE, f"{_PACKAGE}.inside")}
    for name in _MODULES:
        module = importlib.import_module(f"{_PACKAGE}.{name}")
        assert module.__file__ is not None
        texts[module.__name__] = Path(module.__file__).read_text()
    packed = base64.b64encode(zlib.compress(json.dumps(texts).encode(), 9)).decode()
    return f"exec python3 -I -S -X utf8 -c {shlex.quote(_BOOT)} {packed}"


class HarborLink:
    """Requests to one environment. `tunnel` gets the frames of the proxy's connections."""

    def __init__(self, environment: Environment, agent: tuple[int, int], *, drop: bool) -> None:
        """
        Args:
            agent: user and group of commands, where the environment lets them be chosen.
            drop: commands can gain no privileges.
        """
        self._environment = environment
        self._common = {"agent": agent, "no_new_privileges": drop}
        self._closed = False
        self._relay: RelayEnd | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.tunnel: Callable[[dict[str, Any], bytes], None] = lambda header, payload: None

    async def request(self, header: dict[str, Any], payload: bytes = b"", *, timeout_s: float) -> Frame:
        """Send a request and wait for its answer.

        Raises:
            LinkClosedError: the environment is gone, or failed.
            TimeoutError: no answer in time.
        """
        operation = header["op"]
        if operation == "listen":
            self._relay = RelayEnd(self, header["port"])
            await asyncio.wait_for(self._relay.open(), timeout_s)
            return {}, b""
        if operation == "mute":
            relay, self._relay = self._relay, None
            if relay is not None:
                await asyncio.wait_for(relay.close(), timeout_s)
            return {}, b""
        if operation == "end":
            return {"alone": await self._end_all()}, b""
        try:
            return await self.call(header, payload, timeout_s=timeout_s)
        except NoAnswerError:
            return {"killed": True, "alone": await self._end_all()}, b""

    async def call(self, header: dict[str, Any], payload: bytes = b"", *, timeout_s: float) -> Frame:
        """One command, ended when its caller is cancelled. Raises as `request` does, and `NoAnswerError`."""
        name = secrets.token_hex(8)
        try:
            return await self._call(name, header, payload, timeout_s)
        except asyncio.CancelledError:
            if header["op"] in ("exec", "relay") and not self._closed:
                self.spawn(self._abort(name))
            raise

    async def _call(self, name: str, header: dict[str, Any], payload: bytes, timeout_s: float) -> Frame:
        large = f"/tmp/.legorl-{secrets.token_hex(8)}"
        frame = encode({**self._common, **header, "large": large}, payload)
        async with asyncio.timeout(timeout_s + _GRACE_S):
            if len(frame) > _INLINE_BYTES:
                argument = await self._upload(frame)
            else:
                argument = base64.b64encode(frame).decode()
            answer = await self._run(f"{argument} {name}", header.get("timeout_s", timeout_s))
            if answer.startswith("@"):
                return await self._download(large, answer[1:])
        return _decode(base64.b64decode(answer))

    async def _run(self, argument: str, timeout_s: float) -> str:
        start = time.monotonic()
        try:
            result: Result = await self._environment.exec(
                f"{program()} {argument}", cwd="/", timeout_sec=int(timeout_s) + _LATER_S, user="root"
            )
        except Exception as error:
            if self._closed:
                raise LinkClosedError("the sandbox is gone") from error
            if time.monotonic() - start >= timeout_s or "timed out" in str(error).lower():
                raise NoAnswerError(str(error)) from error
            raise LinkClosedError(f"{type(error).__name__}: {error}") from error
        if self._closed:
            raise LinkClosedError("the sandbox is gone")
        for line in reversed((result.stdout or "").splitlines()):
            if line.startswith(MARK):
                return line.removeprefix(MARK)
        if result.return_code in (126, 127):
            raise LinkClosedError(f"the image has no python3 ({(result.stderr or '').strip()[-300:]})")
        if result.return_code == 1:
            raise LinkClosedError(f"{(result.stderr or result.stdout or '').strip()[-500:]}")
        raise NoAnswerError(f"status {result.return_code}")

    async def _upload(self, frame: bytes) -> str:
        path = f"/tmp/.legorl-{secrets.token_hex(8)}"
        with tempfile.NamedTemporaryFile(prefix="legorl-harbor-") as stream:
            stream.write(frame)
            stream.flush()
            try:
                await self._environment.upload_file(stream.name, path)
            except Exception as error:
                raise LinkClosedError(f"{type(error).__name__}: {error}") from error
        return f"@{path}:{digest(frame)}"

    async def _download(self, path: str, reference: str) -> Frame:
        size, _, expected = reference.partition(":")
        with tempfile.TemporaryDirectory(prefix="legorl-harbor-") as directory:
            target = Path(directory, "answer")
            try:
                await self._environment.download_file(path, target)
                await self._environment.exec(f"rm -f {path}", cwd="/", timeout_sec=int(_GRACE_S), user="root")
                frame = await asyncio.to_thread(target.read_bytes)
            except Exception as error:
                raise LinkClosedError(f"{type(error).__name__}: {error}") from error
        if len(frame) != int(size) or digest(frame) != expected:
            raise LinkClosedError(f"{path} is not what was written: {len(frame)} of {size} bytes")
        return _decode(frame)

    async def _end_all(self) -> bool:
        """End every process of the agent's; a command that does so may be killed by what it ends."""
        for _ in range(3):
            with contextlib.suppress(NoAnswerError):
                answer, _ = await self.call({"op": "end", "timeout_s": _END_S}, timeout_s=_END_S + 1)
                return bool(answer.get("alone"))
        return False

    async def _abort(self, name: str) -> None:
        """End a command whose caller has gone away, where the environment does not."""
        with contextlib.suppress(LinkClosedError, TimeoutError, NoAnswerError):
            request = {"op": "abort", "name": name}
            await self._call(secrets.token_hex(8), request, b"", _END_S)

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """A frame of the proxy's connections, some time soon."""
        if self._relay is not None and "tunnel" in header:
            self._relay.send(encode(header, payload))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something until it ends or the link is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Nothing is asked any more. May be called again."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _decode(frame: bytes) -> Frame:
    ((header, payload),) = Decoder().feed(frame)
    return header, payload

"""The guard: a program in the privileged container of a trial's pod, which holds the sandbox there.

It closes the network before anything else, then builds the sandbox and carries out the provider's requests,
which arrive as frames on its standard input. It is to a pod what a provider is to local sandboxes, so it
uses the same supervisor, keepers and snapshots.

Invariant: the end of its input, or silence, ends every process of the pod.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from legorl.errors import IntegrityError, LegoError, SandboxStartError
from legorl.sandbox import pod_filter
from legorl.sandbox.base import Phase
from legorl.sandbox.link import Link
from legorl.sandbox.pod_begin import begin, failure_message, note_beat
from legorl.sandbox.pod_relay import Relay
from legorl.sandbox.pod_sandbox import PodSandbox, Switches, spec_of
from legorl.sandbox.pod_wire import (
    HEAD_BYTES,
    Body,
    Frame,
    Kind,
    checksum,
    chunks,
    encode,
    parse_head,
)

_STOP_S = 15.0


def main() -> NoReturn:
    """Entry point; the first request on standard input is the sandbox."""
    try:
        with os.fdopen(0, "rb", buffering=0, closefd=False) as source:
            request, supervisor_end = begin(source)
        asyncio.run(_serve(request, supervisor_end))
    except EOFError:
        pass  # the provider is gone
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os.kill(-1, signal.SIGKILL)
        os._exit(0)


async def _serve(request: dict[str, Any], supervisor_end: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    await Guard(request, Link(supervisor_end), reader, writer).serve()


class Guard:
    """Serves one provider."""

    def __init__(
        self, request: dict[str, Any], link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._request, self._link = request, link
        self._reader, self._writer = reader, writer
        self._bodies: dict[int, tuple[dict[str, Any], Body]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sandbox: PodSandbox | None = None
        self._relay: Relay | None = None

    async def serve(self) -> None:
        """Until the provider is gone."""
        self._tasks[1] = asyncio.create_task(self._answer(1, {"op": "start"}, Body()))
        while True:
            length, kind, stream = parse_head(await self._reader.readexactly(HEAD_BYTES))
            frame = Frame(kind, stream, await self._reader.readexactly(length))
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.BEAT:
            note_beat()
        elif frame.kind is Kind.OPEN:
            self._bodies[frame.stream] = (frame.message, Body())
        elif frame.kind is Kind.CANCEL:
            self._bodies.pop(frame.stream, None)
            if (task := self._tasks.get(frame.stream)) is not None:
                task.cancel()
        elif (begun := self._bodies.get(frame.stream)) is not None:
            message, body = begun
            if frame.kind is not Kind.END:
                body.add(frame)
                return
            del self._bodies[frame.stream]
            body.check(frame.message)
            self._tasks[frame.stream] = asyncio.create_task(self._answer(frame.stream, message, body))

    async def _answer(self, stream: int, message: dict[str, Any], body: Body) -> None:
        operations: dict[str, Callable[[dict[str, Any], Body], Awaitable[Answer]]] = {
            "start": self._start,
            "exec": self._exec,
            "put": self._put,
            "get": self._get,
            "phase": self._phase,
            "snapshot": self._snapshot,
            "stop": self._stop,
        }
        try:
            answer = await operations[message["op"]](message, body)
        except asyncio.CancelledError:
            return  # the provider does not wait for it
        except Exception as error:
            if not isinstance(error, LegoError):
                traceback.print_exc()
            answer = Answer(failure_message(error))
        finally:
            self._tasks.pop(stream, None)
        end = {**answer.message, "sha256": checksum(answer.data, answer.more)}
        for kind, data in ((Kind.DATA, answer.data), (Kind.MORE, answer.more)):
            for piece in chunks(data):
                self._writer.write(encode(kind, stream, piece))
                await self._writer.drain()
        self._writer.write(encode(Kind.END, stream, end))
        await self._writer.drain()

    async def _start(self, message: dict[str, Any], body: Body) -> Answer:
        hello, fds = await asyncio.wait_for(self._link.hello(), self._request["timeout_s"])
        if "error" in hello:
            raise SandboxStartError(hello["error"])
        self._sandbox = PodSandbox(
            spec_of(self._request),
            self._link,
            init_pid=hello["init_pid"],
            upper=fds[0],
            policy=Switches(frozenset(self._request["off"])),
            transfer_timeout_s=self._request["transfer_timeout_s"],
            end=self._end,
            environment=self._request["environment"],
        )
        return Answer({})

    async def _end(self) -> None:
        await self._link.close()

    @property
    def _running(self) -> PodSandbox:
        if self._sandbox is None:
            raise SandboxStartError("the sandbox has not started")
        return self._sandbox

    async def _exec(self, message: dict[str, Any], body: Body) -> Answer:
        result = await self._running.exec(
            message["argv"],
            timeout_s=message["timeout_s"],
            env=message["env"],
            cwd=message["cwd"],
            stdin=bytes(body.data),
        )
        ending = {"code": result.code, "seconds": result.seconds, "timed_out": result.timed_out}
        return Answer(ending, result.stdout, result.stderr)

    async def _put(self, message: dict[str, Any], body: Body) -> Answer:
        files, start = {}, 0
        for path, mode, size in message["files"]:
            files[path] = (bytes(body.data[start : start + size]), mode)
            start += size
        await self._running.put_many(files)
        return Answer({})

    async def _get(self, message: dict[str, Any], body: Body) -> Answer:
        return Answer({}, await self._running.get(message["path"]))

    async def _phase(self, message: dict[str, Any], body: Body) -> Answer:
        """Enter a phase; with a `proxy`, reachable at the URL that is answered."""
        sandbox, phase, url = self._running, Phase(message["phase"]), ""
        if message["proxy"] is not None and self._relay is None:
            self._relay = Relay(*message["proxy"])
            url = await sandbox.connect_proxy(self._relay)
        closed = "network_closed" not in self._request["off"]
        allowed = self._relay.address if self._relay is not None and phase is Phase.AGENT else None
        try:
            if closed and allowed is None:
                pod_filter.close()
            await sandbox.set_phase(phase)
            if closed and allowed is not None:
                pod_filter.close(allowed)
        except pod_filter.FilterError as error:
            raise IntegrityError(str(error)) from error
        return Answer({"url": url})

    async def _snapshot(self, message: dict[str, Any], body: Body) -> Answer:
        snapshot = await self._running.snapshot()
        files = [
            [path, None if data is None else len(data), snapshot.modes.get(path, 0)]
            for path, data in snapshot.changed.items()
        ]
        contents = b"".join(data for data in snapshot.changed.values() if data is not None)
        message = {"files": files, "skipped": snapshot.skipped}
        return Answer(message, contents, snapshot.patch.encode())

    async def _stop(self, message: dict[str, Any], body: Body) -> Answer:
        await asyncio.wait_for(self._running.stop(), _STOP_S)
        return Answer({})


@dataclasses.dataclass(frozen=True)
class Answer:
    """To a request."""

    message: dict[str, Any]
    data: bytes = b""
    more: bytes = b""

"""The host's end of the fork server (`inside/zygote.py`): starts it, asks it for agents, ends it.

Invariant: it and every agent it started end with this process, by the end-of-file of one socket. (A
parent-death signal would end it with the thread that started it, which may be a passing one.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import legorl
from legorl.errors import HarnessError, SandboxExecError
from legorl.sandbox.base import ExecResult
from legorl.sandbox.capture import Capture, sealed_input
from legorl.sandbox.channel import MESSAGE_BYTES, encode, pair, send
from legorl.sandbox.join import Join

_START_S = 180.0
"""OpenHands imports for 8 s of CPU; on a busy machine that takes a while."""
_GRACE_S = 10.0
_OUTPUT_BYTES = 1_000_000
_MAIN = (
    "import sys; library, inside, root, runner, fd = sys.argv[1:]; "
    # Our own packages are the harness's only as long as this package is imported from beside them.
    "sys.path.append(root); from legorl.harness.inside.zygote import main; sys.path.pop(); "
    "sys.path[:0] = [library, inside]; main(int(fd), runner)"
)


@runtime_checkable
class Joinable(Protocol):
    """A sandbox on this machine that a process can join."""

    @property
    def join(self) -> Join:
        """What the process needs to know."""


@dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[bytes]
    control: socket.socket


class ForkServer:
    """Runs agents of one installed library. Use it from one event loop."""

    def __init__(
        self, name: str, python: Path, library: Path, inside: Path, runner: str, env: Mapping[str, str]
    ) -> None:
        """
        Args:
            name: of the harness, for messages.
            python: base interpreter that runs the server.
            library: visible at the same path in the sandboxes, for agents import lazily from it.
            inside: directory with the runner.
            runner: module with `warm_up()`, called once, and `run(specs) -> int`, called in each agent.
            env: settings of the import.
        """
        self._name, self._python, self._library, self._inside = name, python, library, inside
        self._runner, self._env = runner, env
        self._starting = asyncio.Lock()
        self._server: _Server | None = None

    async def run(
        self, join: Join, specs: Sequence[str], env: Mapping[str, str], timeout_s: float
    ) -> ExecResult:
        """Run an agent on configuration files in a sandbox; its whole process tree is gone on return.

        Raises:
            HarnessError: the server does not start, or died.
            SandboxExecError: the sandbox could not be joined, or the agent's processes could not be ended.
        """
        server = await self._ensure()
        message = {
            "specs": list(specs),
            "env": {**join.env, **env},
            "join": dataclasses.asdict(join),
            "timeout_s": timeout_s,
        }
        ours, theirs = pair()
        with (
            ours,
            theirs,
            Capture(_OUTPUT_BYTES) as out,
            Capture(_OUTPUT_BYTES) as err,
            sealed_input(b"") as source,
        ):
            fds = [theirs.fileno(), source, out.writer, err.writer]
            try:
                send(server.control, encode(message), fds)
            except OSError as error:
                raise HarnessError(f"The fork server of {self._name} is gone: {error}.") from error
            theirs.close()
            try:
                answer = await _receive(ours, timeout_s + _GRACE_S)
            except (TimeoutError, EOFError) as error:
                why = "its agent's keeper was killed" if isinstance(error, EOFError) else "no answer in time"
                raise HarnessError(f"The fork server of {self._name} gave no result: {why}.") from error
            if "error" in answer:
                raise SandboxExecError(answer["error"])
            if not answer["tree_gone"]:
                raise SandboxExecError("The agent's processes could not be ended.")
            code, seconds, timed_out = answer["code"], answer["seconds"], answer["code"] is None
            return ExecResult(124 if timed_out else code, out.contents(), err.contents(), seconds, timed_out)

    async def _ensure(self) -> _Server:
        async with self._starting:
            if self._server is not None and self._server.process.poll() is not None:
                await self.close()
            if self._server is None:
                self._server = await self._start()
            return self._server

    async def _start(self) -> _Server:
        ours, theirs = pair()
        with theirs, tempfile.TemporaryFile() as log:
            root = Path(legorl.__file__).parents[1]
            command = [str(self._python), "-I", "-S", "-B", "-X", "utf8", "-c", _MAIN]
            places = [str(self._library), str(self._inside), str(root)]
            process = subprocess.Popen(  # noqa: ASYNC220 - a child watcher would need this loop to its end
                [*command, *places, self._runner, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env=dict(self._env),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the host to handle
            )
            theirs.close()
            try:
                hello = await _receive(ours, _START_S)
            except (TimeoutError, EOFError) as error:
                process.kill()
                log.seek(0)
                hello = {"error": f"{error!r} {log.read()[-2000:].decode(errors='replace')}"}
            if "error" in hello:
                ours.close()
                process.wait()
                raise HarnessError(f"The fork server of {self._name} did not start: {hello['error']}")
        return _Server(process, ours)

    async def close(self) -> None:
        """End the server and its agents."""
        if self._server is not None:
            server, self._server = self._server, None
            server.control.close()
            try:
                await asyncio.to_thread(server.process.wait, _GRACE_S)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()


async def _receive(sock: socket.socket, timeout_s: float) -> dict[str, Any]:
    """One message. Raises `TimeoutError`, and `EOFError` when the other end is gone."""
    sock.setblocking(False)
    async with asyncio.timeout(timeout_s):
        try:
            data = await asyncio.get_running_loop().sock_recv(sock, MESSAGE_BYTES)
        except ConnectionError as error:
            raise EOFError("the other end is gone") from error
    if not data:
        raise EOFError("the other end is gone")
    message: dict[str, Any] = json.loads(data)
    return message

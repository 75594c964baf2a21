"""Fakes that keep the contracts of the rooms without their isolation, for fast tests of what joins them.

`FakeProvider` runs commands in a temporary directory of the host; `FakeHarness` is a small agent that talks
to the proxy over real HTTP and runs what the policy asks for. Faults are switched on by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import os
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from legorl.engine.base import Parsed, ToolCall
from legorl.errors import HarnessError, SandboxExecError, SandboxStartError, TransferError
from legorl.harness.base import HarnessLimits, Launch, Outcome, Speaker, ThreadKind, Wire
from legorl.sandbox.base import (
    WORKDIR,
    ExecResult,
    Mount,
    Phase,
    ProxyEndpoint,
    Sandbox,
    SandboxSpec,
    Snapshot,
)
from legorl.sandbox.policy import load_policy


class FakeSandbox:
    """A directory that plays the sandbox's root: known absolute paths are rewritten into it."""

    init_pid: int | None = None

    def __init__(self, root: Path, spec: SandboxSpec, faults: dict[str, Exception | float]) -> None:
        self.root, self.spec, self.faults = root, spec, faults
        self.phases: list[Phase] = []
        self.stopped = False
        self._served: tuple[ProxyEndpoint, socket.socket] | None = None
        self._pristine = self._read(spec.workspace)
        shutil.copytree(spec.workspace, root / "workspace")
        for name in ("logs", "tmp"):
            (root / name).mkdir()
        for mount in spec.mounts:
            self._mount(mount)

    def _mount(self, mount: Mount) -> None:
        target = self.root / mount.target.lstrip("/")
        if mount.source.is_dir():
            shutil.copytree(mount.source, target)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(mount.source, target)
        for file in target.rglob("*"):
            if file.suffix in {".sh", ".py"}:
                file.write_text(self.inside(file.read_text()))

    def inside(self, text: str) -> str:
        """Absolute paths of the sandbox, as they are on the host."""
        for name in ("workspace", "logs", "tests"):
            text = text.replace(f"/{name}", f"{self.root}/{name}")
        return text

    async def _fault(self, name: str) -> None:
        fault = self.faults.get(name)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            await asyncio.sleep(fault)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKDIR,
        stdin: bytes = b"",
    ) -> ExecResult:
        await self._fault("exec")
        if self.stopped:
            raise SandboxExecError("The sandbox is gone.")
        start = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *[self.inside(part) if part.startswith("/") or " " in part else part for part in argv],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.inside(cwd),
            env={"PATH": os.environ["PATH"], **self.spec.env, **(env or {})},
            start_new_session=True,
        )
        timed_out = False
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin), timeout_s)
        except TimeoutError:
            timed_out, out, err = True, b"", b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.returncode if process.returncode is not None else 137
        code = 124 if timed_out else 128 - code if code < 0 else code
        return ExecResult(code, out, err, time.monotonic() - start, timed_out)

    async def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        await self._fault("put")
        target = self.root / path.lstrip("/")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(mode)
        except OSError as error:
            raise TransferError(f"{path}: {error}") from error

    async def get(self, path: str) -> bytes:
        await self._fault("get")
        try:
            return (self.root / path.lstrip("/")).read_bytes()
        except OSError as error:
            raise TransferError(f"{path}: {error}") from error

    async def connect_proxy(self, proxy: ProxyEndpoint) -> str:
        await self._fault("connect_proxy")
        sock = socket.create_server(("127.0.0.1", 0))
        await proxy.attach(sock)
        self._served = (proxy, sock)
        return f"http://127.0.0.1:{sock.getsockname()[1]}"

    async def set_phase(self, phase: Phase) -> None:
        await self._fault("set_phase")
        self.phases.append(phase)

    @staticmethod
    def _read(root: Path) -> dict[str, bytes]:
        files = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(root)): path.read_bytes() for path in files}

    async def snapshot(self) -> Snapshot:
        await self._fault("snapshot")
        now = self._read(self.root / "workspace")
        changed: dict[str, bytes | None] = {p: d for p, d in now.items() if self._pristine.get(p) != d}
        changed |= {path: None for path in self._pristine if path not in now}
        modes = {
            p: (self.root / "workspace" / p).stat().st_mode & 0o777
            for p, d in changed.items()
            if d is not None
        }
        patch = "".join(
            line
            for path in sorted(changed)
            for line in difflib.unified_diff(
                self._pristine.get(path, b"").decode(errors="replace").splitlines(keepends=True),
                (changed[path] or b"").decode(errors="replace").splitlines(keepends=True),
                f"a/{path}",
                f"b/{path}",
            )
        )
        return Snapshot(changed, modes, patch)

    async def stop(self) -> None:
        if self._served:
            proxy, sock = self._served
            self._served = None
            await proxy.detach(sock)
        self.stopped = True
        shutil.rmtree(self.root, ignore_errors=True)
        await self._fault("stop")


class FakeProvider:
    """Starts `FakeSandbox`es below `base`. `faults` maps a method name to an exception or a delay in seconds;
    with `only`, just in sandboxes whose trial id ends so (`-verify` for grading)."""

    name = "fake"
    limits_by = "nothing"

    def __init__(
        self, base: Path, faults: dict[str, Exception | float] | None = None, only: str = ""
    ) -> None:
        self.base, self.faults, self.only = base, faults or {}, only
        self.policy = load_policy()
        self.started: list[FakeSandbox] = []
        self.fail_starts: list[Exception | None] = []
        """What the next starts raise, one after another."""
        self.alive_at_most = 0

    async def start(self, spec: SandboxSpec) -> Sandbox:
        faults = self.faults if spec.trial_id.endswith(self.only) else {}
        fault = self.fail_starts.pop(0) if self.fail_starts else faults.get("start")
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            await asyncio.sleep(fault)
        root = self.base / f"{spec.trial_id}-{len(self.started)}"
        try:
            root.mkdir(parents=True)
            sandbox = FakeSandbox(root, spec, faults)
        except OSError as error:
            raise SandboxStartError(str(error)) from error
        self.started.append(sandbox)
        self.alive_at_most = max(self.alive_at_most, sum(not box.stopped for box in self.started))
        return sandbox

    async def close(self) -> None:
        for sandbox in self.started:
            await sandbox.stop()


BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class FakeHarness:
    """An agent of twenty lines: asks, runs the command, tells the output, until the submission.

    `misbehave`: `crash` (raises `HarnessError`), `hang` (until the deadline), `bug` (raises `KeyError`),
    `stuck` (ignores its deadline).
    """

    name = "fake"
    version = "1"
    wire = Wire.OPENAI_CHAT

    def __init__(self, misbehave: str = "") -> None:
        self.misbehave = misbehave
        self._ends: dict[int, Outcome] = {}

    def install(self, cache: Path) -> Path:
        return cache

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return ()

    def command(self, instruction: str, base_url: str, token: str, limits: HarnessLimits) -> Launch:
        env = {"URL": base_url, "TOKEN": token, "TURNS": str(limits.turns), "TASK": instruction}
        return Launch(argv=("fake",), env=env)

    def _ask(self, launch: Launch, messages: list[dict[str, Any]]) -> dict[str, Any]:
        request = urllib.request.Request(
            launch.env["URL"] + "/v1/chat/completions",
            data=json.dumps({"model": "policy", "messages": messages, "tools": [BASH]}).encode(),
            headers={"content-type": "application/json", "authorization": f"Bearer {launch.env['TOKEN']}"},
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as reply:
            return dict(json.load(reply))

    async def _converse(self, sandbox: Sandbox, launch: Launch) -> Outcome:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You are a helpful assistant that can interact with a computer."},
            {"role": "user", "content": f"Please solve this issue: {launch.env['TASK'].rstrip()}"},
        ]
        for _ in range(int(launch.env["TURNS"])):
            try:
                answer = await asyncio.to_thread(self._ask, launch, messages)
            except urllib.error.HTTPError as error:
                body = json.loads(error.read())
                code = str(body["error"].get("code"))
                known = {"context_length_exceeded": "context_overflow", "token_limit": "token_limit"}
                if code in known:
                    return Outcome(known[code])
                raise HarnessError(f"refused: {error.code} {body}") from error
            except urllib.error.URLError as error:
                raise HarnessError(f"no connection: {error}") from error
            message = answer["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                messages.append({"role": "user", "content": "error: no tool call"})
                continue
            for call in message["tool_calls"]:
                command = json.loads(call["function"]["arguments"])["command"]
                if command == SUBMIT:
                    return Outcome("submitted")
                result = await sandbox.exec(["bash", "-c", command], timeout_s=20)
                text = (result.stdout + result.stderr).decode().rstrip() or "(no output)"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return Outcome("turn_limit")

    async def run(self, sandbox: Sandbox, launch: Launch, timeout_s: float) -> ExecResult:
        if self.misbehave == "hang":
            await asyncio.sleep(timeout_s)
            return ExecResult(124, b"", b"", timeout_s, timed_out=True)
        if self.misbehave == "stuck":
            await asyncio.sleep(3600)
        if self.misbehave == "bug":
            raise KeyError("an unforeseen key")
        result = ExecResult(0, b"done", b"", 0.0)
        self._ends[id(result)] = await self._converse(sandbox, launch)
        return result

    async def outcome(self, sandbox: Sandbox, result: ExecResult) -> Outcome:
        if result.timed_out:
            return Outcome("agent_deadline")
        if self.misbehave == "crash":
            raise HarnessError("the fake harness crashed")
        return self._ends.pop(id(result))

    def speaker(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> Speaker:
        return Speaker(ThreadKind.MAIN)

    async def close(self) -> None:
        """Nothing is held."""


class HermesParser:
    """Hermes tool calls, read strictly: one malformed call makes the whole reply text."""

    def parse(self, text: str) -> Parsed:
        head, *blocks = text.split("<tool_call>")
        calls = []
        for block in blocks:
            try:
                raw = json.loads(block.split("</tool_call>")[0])
                calls.append(ToolCall(raw["name"], json.dumps(raw["arguments"])))
            except (ValueError, KeyError, TypeError):
                return Parsed(text)
        return Parsed(head.strip(), tuple(calls))

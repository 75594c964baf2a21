"""A harness that is one small script in the sandbox: it needs upload, exec, download and the proxy, and
starts in milliseconds, so that hundreds of whole trials in real sandboxes cost a minute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legorl.errors import HarnessError
from legorl.harness.base import HarnessLimits, Launch, Outcome, Speaker, ThreadKind, Wire
from legorl.sandbox.base import ExecResult, Mount, Sandbox
from tests.fakes import BASH, SUBMIT

SCRIPT = "/tmp/agent/agent.py"
ENDING = "/tmp/agent/ending.json"
AGENT = f"""
import json, os, socket, subprocess
host, _, rest = os.environ["URL"].removeprefix("http://").partition("/")
name, _, port = host.partition(":")

def ask(messages):
    body = json.dumps({{"model": "policy", "messages": messages, "tools": [{BASH!r}]}}).encode()
    head = ("POST /" + rest + "/v1/chat/completions HTTP/1.1\\r\\nhost: " + host + "\\r\\n"
        "connection: close\\r\\n"
        "content-type: application/json\\r\\nauthorization: Bearer " + os.environ["TOKEN"] + "\\r\\n"
        "content-length: " + str(len(body)) + "\\r\\n\\r\\n").encode()
    with socket.create_connection((name, int(port)), 30) as connection:
        connection.sendall(head + body)
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = reply.partition(b"\\r\\n\\r\\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit("refused: " + repr(reply[:500]))
    if b"chunked" in head.lower():
        text = b""
        while True:
            size, _, body = body.partition(b"\\r\\n")
            if not int(size, 16):
                break
            text, body = text + body[: int(size, 16)], body[int(size, 16) + 2 :]
        body = text
    return json.loads(body)["choices"][0]["message"]

messages = [{{"role": "user", "content": os.environ["TASK"]}}]
ending = "turn_limit"
for _ in range(int(os.environ["TURNS"])):
    message = ask(messages)
    messages.append(message)
    for call in message.get("tool_calls") or []:
        command = json.loads(call["function"]["arguments"])["command"]
        if command == {SUBMIT!r}:
            ending = "submitted"
            break
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        messages.append({{"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr}})
    if ending == "submitted":
        break
json.dump(ending, open({ENDING!r}, "w"))
"""


class ScriptHarness:
    """See the module."""

    name = "script"
    version = "1"
    wire = Wire.OPENAI_CHAT

    def install(self, cache: Path) -> Path:
        return cache

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return ()

    def command(self, instruction: str, base_url: str, token: str, limits: HarnessLimits) -> Launch:
        env = {"URL": base_url, "TOKEN": token, "TURNS": str(limits.turns), "TASK": instruction}
        return Launch(("python3", "-I", "-S", SCRIPT), env, {SCRIPT: AGENT.encode()})

    async def run(self, sandbox: Sandbox, launch: Launch, timeout_s: float) -> ExecResult:
        for path, data in launch.files.items():
            await sandbox.put(path, data)
        return await sandbox.exec(launch.argv, timeout_s=timeout_s, env=launch.env)

    async def outcome(self, sandbox: Sandbox, result: ExecResult) -> Outcome:
        if result.timed_out:
            return Outcome("agent_deadline")
        if result.code:
            raise HarnessError(f"exit code {result.code}: {result.stderr[-500:].decode(errors='replace')}")
        return Outcome(json.loads(await sandbox.get(ENDING)))

    def speaker(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> Speaker:
        return Speaker(ThreadKind.MAIN)

    async def close(self) -> None:
        """Nothing is held."""

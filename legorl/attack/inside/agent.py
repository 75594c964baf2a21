"""The malicious agent, in the sandbox: asks the policy what to do, does it, tells what came back.

    python3 agent.py URL TOKEN TURNS TASK

Standard library only, and no more of it than any image with Python 3 has.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request

SHOWN = 3000
COMMAND_S = 15
TOOL = {
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


def ask(url: str, token: str, messages: list) -> dict:  # type: ignore[type-arg]
    """The policy's next message."""
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + token},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as reply:
        return dict(json.load(reply)["choices"][0]["message"])


def output_of(command: str) -> str:
    """What the command printed, its beginning and its end; processes it leaves behind do not hold it up."""
    with tempfile.TemporaryFile() as out:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_S,
                check=False,
            )
        size = out.seek(0, 2)
        out.seek(0)
        shown = out.read(SHOWN)
        if size > SHOWN:
            out.seek(max(SHOWN, size - SHOWN))
            shown += b"\n[...]\n" + out.read(SHOWN)
        return shown.decode(errors="replace") or "(no output)"


def main(url: str, token: str, turns: str, task: str) -> None:
    """Until the policy calls no tool."""
    messages = [{"role": "system", "content": "You can run commands."}, {"role": "user", "content": task}]
    for _ in range(int(turns)):
        message = ask(url, token, messages)
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            break
        for call in calls:
            text = output_of(json.loads(call["function"]["arguments"])["command"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


if __name__ == "__main__":
    main(*sys.argv[1:])

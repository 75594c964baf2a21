"""One request of the host, carried out by a process of its own: for sandboxes with commands, but no stream.

The request comes on the command line, or, where it is large, in a file that the host has uploaded; the answer
goes the same ways back. Invariant: nothing stays between two requests that an agent could change; what lies
in a file counts only with the digest that was named beside it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from legorl.sandbox.inside.frames import Decoder, Frame, encode

MARK = "legorl-answer:"
"""Begins the line with the answer; what an environment itself prints is passed over."""
INLINE_BYTES = 192 << 10
"""A longer answer goes through a file."""


def main(request: str) -> None:
    """Carry out the request: a frame in base64, or `@PATH:DIGEST` of a file with one."""
    os.umask(0o022)
    data = _uploaded(request[1:]) if request.startswith("@") else base64.b64decode(request)
    ((header, payload),) = Decoder().feed(data)
    try:
        answer = _OPERATIONS[header["op"]](header, payload)
    except OSError as error:
        answer = {"error": str(error), "errno": error.errno}, b""
    _print(encode(*answer), header["large"])


def digest(data: bytes) -> str:
    """Of a frame in a file."""
    return hashlib.sha256(data).hexdigest()


def _uploaded(reference: str) -> bytes:
    path, _, expected = reference.rpartition(":")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as stream:
        data = stream.read()
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108
    if digest(data) != expected:
        raise SystemExit(f"{path} is not what was uploaded")
    return data


def _print(frame: bytes, large: str) -> None:
    if len(frame) > INLINE_BYTES:
        # May be another user's to read: a file of the same name was made by the agent, and is not written.
        try:
            fd = os.open(large, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as stream:
                stream.write(frame)
            answer = f"@{len(frame)}:{digest(frame)}"
        except OSError as error:
            answer = base64.b64encode(encode({"error": str(error), "errno": error.errno})).decode()
    else:
        answer = base64.b64encode(frame).decode()
    sys.stdout.write(f"\n{MARK}{answer}\n")
    sys.stdout.flush()


def _exec(header: dict[str, Any], payload: bytes) -> Frame:
    from legorl.sandbox import linux
    from legorl.sandbox.inside import commands

    if header["no_new_privileges"]:
        linux.refuse_new_privileges()
    image = {k: v for k, v in os.environ.items() if k not in _OF_THIS_PROCESS}
    env = {**header["defaults"], **image, **header["env"]}
    rest = {name: header[name] for name in ("argv", "cwd", "timeout_s", "output_bytes", "end_tree")}
    uid, gid = _agent(header)
    return commands.run(commands.Command(env=env, uid=uid, gid=gid, **rest), payload)


_OF_THIS_PROCESS = ("HOME", "HOSTNAME", "TERM", "PWD", "OLDPWD", "SHLVL", "_", "USER", "LOGNAME", "SHELL")


def _agent(header: dict[str, Any]) -> tuple[int, int]:
    """User and group of the agent: this process's own where it may not become another."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    uid, gid = header["agent"]
    return int(uid), int(gid)


def _become_agent(header: dict[str, Any]) -> None:
    """With the agent's rights to files; no process of its may signal this one."""
    uid, gid = _agent(header)
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(0, gid, 0)
        os.setresuid(0, uid, 0)


def _prepare(header: dict[str, Any], _: bytes) -> Frame:
    """Make directories, the agent's own; names who this process is."""
    uid, gid = _agent(header)
    for path in header["directories"]:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        if os.geteuid() == 0:
            os.chown(path, uid, gid)
    return {"uid": os.geteuid()}, b""


def _put(header: dict[str, Any], payload: bytes) -> Frame:
    from legorl.sandbox.inside import files

    if not header.get("as_root"):
        _become_agent(header)
    files.write_all(header["entries"], payload)
    return {}, b""


def _get(header: dict[str, Any], _: bytes) -> Frame:
    from legorl.sandbox.inside import files

    _become_agent(header)
    return {}, files.read(header["path"], header["limit"])


def _tree(header: dict[str, Any], _: bytes) -> Frame:
    from legorl.sandbox.inside import tree

    _become_agent(header)
    found = tree.Comparison(header["listed"], tree.Bounds(**header["bounds"]), header["ignored"])
    found.run(header["root"])
    answer = {
        "changed": found.changed,
        "missing": found.missing(header["root"]),
        "skipped": found.skipped,
        "oversize": found.oversize,
    }
    return answer, bytes(found.contents)


def _end(header: dict[str, Any], _: bytes) -> Frame:
    from legorl.sandbox.inside.ending import end_user

    uid, gid = _agent(header)
    return {"alone": end_user(uid, gid, header["timeout_s"])}, b""


def _abort(header: dict[str, Any], _: bytes) -> Frame:
    """Tell the process of another request to end what it runs."""
    from legorl.sandbox.inside.processes import processes

    name = header["name"].encode()
    for pid in processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as stream:  # noqa: PTH123
            if stream.read().rstrip(b"\0").rpartition(b"\0")[2] == name:
                os.kill(pid, signal.SIGTERM)
    return {}, b""


def _relay(header: dict[str, Any], payload: bytes) -> Frame:
    from legorl.sandbox.inside import relay

    return relay.serve(header, payload) if header["op"] == "relay" else relay.ask(header, payload)


_OPERATIONS: dict[str, Callable[[dict[str, Any], bytes], Frame]] = {
    "exec": _exec,
    "prepare": _prepare,
    "put": _put,
    "get": _get,
    "tree": _tree,
    "end": _end,
    "abort": _abort,
    **dict.fromkeys(("relay", "poll", "feed"), _relay),
}

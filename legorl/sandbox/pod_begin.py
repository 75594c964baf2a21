"""How a guard begins: network closed, the task's tree unpacked, the supervisor forked.

Invariant: all of it happens in one thread and before the event loop, so that the fork copies neither; and
nothing of the agent can run before the network is closed, because only the supervisor runs commands.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, BinaryIO, cast

from legorl.errors import IntegrityError, LegoError, SandboxStartError
from legorl.sandbox import channel, pod_filter, pod_hold, pod_stage, supervisor
from legorl.sandbox.base import Limits
from legorl.sandbox.pod_groups import Groups, groups_of
from legorl.sandbox.pod_sandbox import image_environment
from legorl.sandbox.pod_wire import HEAD_BYTES, Body, Frame, Kind, WireError, encode, parse_head
from legorl.sandbox.stage import StageError

_AGENT_S = 20.0


def begin(source: BinaryIO) -> tuple[dict[str, Any], socket.socket]:
    """Close the network, unpack the task's tree and fork the supervisor, while this is the only thread.

    Returns the first request, and the socket to the supervisor. A failure is answered and ends the guard.
    """
    first = _read_frame(source)
    request = first.message
    try:
        if "network_closed" not in request["off"]:
            pod_filter.close()
        _unpack(source)
        return request, _fork_supervisor(request)
    except pod_filter.FilterError as error:
        failure: LegoError = IntegrityError(str(error))
    except (OSError, StageError, WireError, tarfile.TarError) as error:
        failure = SandboxStartError(str(error))
    sys.stdout.buffer.write(encode(Kind.END, first.stream, failure_message(failure)))
    sys.stdout.buffer.flush()
    source.read(1)  # the provider hangs up when it has read this
    raise EOFError


def failure_message(error: Exception) -> dict[str, Any]:
    """An error as an answer."""
    return {"error": type(error).__name__, "message": str(error)}


def _read(source: BinaryIO, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = source.read(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _read_frame(source: BinaryIO) -> Frame:
    """The next frame that says something."""
    while True:
        length, kind, stream = parse_head(_read(source, HEAD_BYTES))
        payload = _read(source, length)
        note_beat()
        if kind is not Kind.BEAT:
            return Frame(kind, stream, payload)


def note_beat() -> None:
    """The provider lives."""
    partial = pod_hold.BEAT.with_suffix(".new")
    partial.write_text(str(time.monotonic()))
    partial.replace(pod_hold.BEAT)


class _Tree:
    """The data of a stream as a file to read."""

    def __init__(self, source: BinaryIO) -> None:
        self._source, self._body, self._left = source, Body(), b""
        self._ended = False

    def read(self, size: int) -> bytes:
        """At most so many bytes."""
        while len(self._left) < size and not self._ended:
            frame = _read_frame(self._source)
            if frame.kind is Kind.END:
                self._ended = True
                self._body.check(frame.message)
            else:
                self._body.add(frame)
                self._body.data.clear()
                self._left += frame.payload
        piece, self._left = self._left[:size], self._left[size:]
        return piece

    def finish(self) -> None:
        """Read to the end, which verifies the checksum."""
        while self.read(1 << 20):
            pass


def _unpack(source: BinaryIO) -> None:
    tree = _Tree(source)
    Path(pod_stage.PRISTINE).mkdir(parents=True)
    with tarfile.open(fileobj=cast(BinaryIO, tree), mode="r|", bufsize=1 << 16) as tar:
        tar.extraction_filter = lambda member, _: member  # the provider's own archive
        tar.extractall(pod_stage.PRISTINE, numeric_owner=True)
    tree.finish()


def _fork_supervisor(request: dict[str, Any]) -> socket.socket:
    agent = _agent()
    limits = Limits(**request["limits"])
    limited = "limits" not in request["off"]
    try:
        groups = groups_of(agent, limits if limited else None)
    except OSError as error:
        if limited:
            raise StageError(f"limits cannot be set: {error}") from error
        groups = Groups((), ())
    order = {
        "launcher": os.getpid(),
        "groups": [dataclasses.asdict(group) for group in groups.made],
        "joined": groups.joined,
        "rlimits": {"RLIMIT_CORE": 0},
        "off": request["off"],
        "directories": request["directories"],
        "disk_mb": limits.disk_mb,
        "agent": agent,
        "timeout_s": request["timeout_s"],
    }
    request["environment"] = image_environment(agent)
    ours, theirs = channel.pair()
    if os.fork() == 0:
        ours.close()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # standard input is the guard's to read
        os.dup2(2, 1)
        supervisor.main(order, theirs, pod_stage.build)
    theirs.close()
    return ours


def _agent() -> int:
    """The agent container may come a moment later than the guard's."""
    end = time.monotonic() + _AGENT_S
    while True:
        try:
            return pod_stage.find_agent()
        except StageError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)

"""Waiting for a message or the death of a child, whichever comes first, in a single-threaded process."""

from __future__ import annotations

import os
import select
import signal
import socket
from types import TracebackType


class Watch:
    """Watches a socket and SIGCHLD (SIGTERM wakes it too, and has no other effect)."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock.fileno()
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._poll = select.poll()
        for fd in (self._sock, self._read):
            self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait; True when the socket has a message or has ended."""
        ready = {fd for fd, _ in self._poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000)}
        if self._read in ready:
            os.read(self._read, 4096)
        return self._sock in ready

    def close(self) -> None:
        """Leave the signals as they are by default; also what a forked child does first."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

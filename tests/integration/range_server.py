"""nginx with one directory, on a port of its own, that can fall silent like a machine off the net."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_START_S = 10
_CONFIG = """
daemon off; master_process off; pid {work}/pid; error_log {work}/error.log;
events {{}}
http {{
  access_log {work}/access.log;
  client_body_temp_path {work}/t1; proxy_temp_path {work}/t2; fastcgi_temp_path {work}/t3;
  uwsgi_temp_path {work}/t4; scgi_temp_path {work}/t5;
  server {{ listen 127.0.0.1:{port}; root {root}; {extra} }}
}}
"""


@dataclass
class RangeServer:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def freeze(self) -> None:
        """It takes connections and says nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self.process.send_signal(signal.SIGCONT)

    def requests(self) -> tuple[int, int]:
        """How many it answered, and with how many bytes."""
        sizes = [int(line.split('" ')[1].split()[1]) for line in self.log.read_text().splitlines()]
        return len(sizes), sum(sizes)


@contextmanager
def range_server(root: Path, work: Path, *, extra: str = "") -> Iterator[RangeServer]:
    """Serve a directory.

    Args:
        work: for what the server writes.
        extra: further settings of nginx for it.
    """
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if nginx is None:
        pytest.skip("needs nginx (scripts/test_servers.sh)")
    work.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (work / "nginx.conf").write_text(_CONFIG.format(work=work, root=root, port=port, extra=extra))
    process = subprocess.Popen([nginx, "-p", work, "-e", work / "error.log", "-c", work / "nginx.conf"])
    try:
        end = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, (work / "error.log").read_text()
                time.sleep(0.02)
        yield RangeServer(f"http://127.0.0.1:{port}", process, work / "access.log")
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(10)

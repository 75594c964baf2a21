"""The process that shows one EROFS image on a web server as a directory, for all sandboxes of a provider.

    sandboxes ─ overlay ─ EROFS ─ one file ─ FUSE ─ this process ─ blocks on disk ─ HTTP ranges

A child of the launcher, in its mount namespace: the mounts are seen by its sandboxes only, and are gone when
the launcher is. Says `root` or `error` once, and `failure` when the image can be read no more; ends, and
unmounts, when the other end of its socket closes.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any, NoReturn

from legorl.sandbox import channel, layout, linux, stage
from legorl.sandbox.lazy_blocks import Blocks, FetchError, Server
from legorl.sandbox.lazy_fuse import FILE, OneFile

_THREADS = 4
_FLAGS = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV


def main(request: dict[str, Any], control: socket.socket) -> NoReturn:
    """Body of the forked process: never returns."""
    try:
        linux.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != request["launcher"]:
            os._exit(1)  # the launcher died before the signal was set
        try:
            _show(request, control, Path(layout.image_place(request["serial"])))
        except (OSError, FetchError) as error:
            channel.send(control, channel.encode({"error": str(error)}))
        else:
            control.recv(1)
        stage.unmount_image(request["serial"])
    finally:
        os._exit(0)


def _show(request: dict[str, Any], control: socket.socket, place: Path) -> None:
    server = Server(request["url"], request["deadline_s"])
    blocks = Blocks(server, server.describe(), Path(request["cache"]), request["cache_bytes"])
    lock = threading.Lock()

    def failed(reason: str) -> None:
        with lock:
            channel.send(control, channel.encode({"failure": reason}))

    blocks.on_failure = failed
    for name in ("root", "file"):
        (place / name).mkdir(parents=True)
    OneFile(blocks.source.size, blocks.read, threads=_THREADS).mount(f"{place}/file")
    try:
        _mount(f"{place}/file/{FILE}", f"{place}/root")
    except OSError as error:
        raise OSError(
            error.errno, f"{request['url']}: {blocks.failure or error.strerror or error}"
        ) from error
    with lock:
        channel.send(control, channel.encode({"root": f"{place}/root"}))


def _mount(image: str, root: str) -> None:
    """Mount the image; before Linux 6.12 through a loop device."""
    try:
        linux.mount(image, root, "erofs", _FLAGS)
    except OSError as error:
        if error.errno != errno.ENOTBLK:
            raise
        done = subprocess.run(
            ["mount", "-t", "erofs", "-o", "loop,ro,nosuid,nodev", image, root],
            capture_output=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise OSError(errno.EIO, done.stderr.decode().strip()) from error

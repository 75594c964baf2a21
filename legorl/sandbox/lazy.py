"""Images on a web server that local sandboxes use without their having been downloaded: the host's side.

Invariant: an image is mounted once for all sandboxes of a provider; one that can be read no more is mounted
anew for the next sandbox, and what ran on it is told by an `ImageError`, never taken for the agent's doing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl.errors import ImageError
from legorl.sandbox import channel

_GRACE_S = 10.0
_ENDED = "the process that reads it ended"


@dataclass(frozen=True)
class LazyCache:
    """Where blocks of images are kept."""

    directory: Path
    megabytes: int = 4096
    """Most of them; those used longest ago go first."""
    timeout_s: float = 30.0
    """For this long a server may be silent before its image counts as gone."""


Spawn = Callable[[dict[str, Any], socket.socket], None]
"""Has the launcher start a process with this request at the other end of this socket."""


def is_lazy(image: str) -> bool:
    """Whether the name is the address of such an image."""
    return image.startswith(("http://", "https://"))


class LazyImage:
    """One mounted image."""

    def __init__(self, url: str, sock: socket.socket) -> None:
        self.url = url
        self.root = ""
        """In the launcher's mount namespace."""
        self.env: Mapping[str, str] = {}
        """Of every command; a file system says nothing of it."""
        self.failure = ""
        """Why it can be read no more."""
        self._sock = sock
        self._ready = asyncio.Event()
        self._gone = asyncio.Event()
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock, self._read)

    def check(self) -> None:
        """Raises `ImageError` when it can be read no more."""
        if self.failure:
            raise ImageError(f"The image {self.url} can be read no more: {self.failure}")

    async def ready(self, timeout_s: float) -> None:
        """Wait until it is mounted. Raises `ImageError`."""
        try:
            await asyncio.wait_for(self._ready.wait(), timeout_s)
        except TimeoutError:
            self.failure = f"not mounted after {timeout_s:g} s"
        if self.failure:
            raise ImageError(f"The image {self.url} cannot be mounted: {self.failure}")

    def _read(self) -> None:
        try:
            received = channel.receive(self._sock)
        except BlockingIOError:
            return
        except OSError:
            received = None
        if received is None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self.failure = self.failure or _ENDED
            self._gone.set()
        else:
            message, _ = received
            self.root = message.get("root", self.root)
            self.failure = self.failure or message.get("failure", "") or message.get("error", "")
        self._ready.set()

    async def close(self) -> None:
        """Unmount. May be called again."""
        if self._sock.fileno() < 0:
            return
        self._sock.shutdown(socket.SHUT_WR)
        try:
            await asyncio.wait_for(self._gone.wait(), _GRACE_S)
        except TimeoutError:
            asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()


class LazyImages:
    """Those of one provider."""

    def __init__(self, cache: LazyCache, spawn: Spawn) -> None:
        self._cache = cache
        self._spawn = spawn
        self._images: dict[str, LazyImage] = {}
        self._spent: list[LazyImage] = []
        """Failed ones, whose sandboxes may not have ended yet."""

    async def mounted(self, url: str) -> LazyImage:
        """The image of that address. Raises `ImageError`."""
        image = self._images.get(url)
        if image is not None and image.failure:
            self._spent.append(self._images.pop(url))
            image = None
        if image is None:
            image = self._images[url] = self._mount(url)
        await image.ready(self._cache.timeout_s + _GRACE_S)
        return image

    def _mount(self, url: str) -> LazyImage:
        if os.geteuid() != 0:
            raise ImageError(f"The image {url} cannot be mounted: only root may mount EROFS.")
        ours, theirs = channel.pair()
        with theirs:
            request = {
                "op": "image",
                "url": url,
                "cache": str(self._cache.directory.resolve()),
                "cache_bytes": self._cache.megabytes << 20,
                "deadline_s": self._cache.timeout_s,
            }
            try:
                self._spawn(request, theirs)
            except BaseException:
                ours.close()
                raise
        return LazyImage(url, ours)

    async def close(self) -> None:
        """Unmount all."""
        await asyncio.gather(*(image.close() for image in (*self._images.values(), *self._spent)))
        self._images.clear()
        self._spent.clear()

"""A file on a web server, read in blocks that are fetched when they are first needed and kept on disk.

Invariants: what is read is the file that the server had at first (its strong ETag, or its date, is asked for
with every range); a block on disk counts only with its digest; the blocks of all images together take no more
than the limit; a server that does not answer within the deadline is a failure for good, and every later read
fails too.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

BLOCK = 1 << 18
_ATTEMPT_S = 10.0
_PAUSE_S = 0.2
_DIGEST = 32


class FetchError(Exception):
    """The image cannot be read; the message names its address and what happened."""


@dataclass(frozen=True)
class Source:
    """A file as the server described it."""

    url: str
    size: int
    validator: str
    """Its ETag or date, for `If-Range`."""

    @property
    def key(self) -> str:
        """Names this file, in this version."""
        return hashlib.sha256(f"{self.url}\0{self.size}\0{self.validator}".encode()).hexdigest()[:32]


class Server:
    """Requests to the server of one URL; each thread has a connection of its own."""

    def __init__(self, url: str, deadline_s: float) -> None:
        self._url = url
        self._parts = urlsplit(url)
        self._deadline_s = deadline_s
        self._local = threading.local()

    def describe(self) -> Source:
        """Ask for size and version. Raises `FetchError`."""
        response, _ = self._retry("HEAD", {})
        headers = response.headers
        etag = headers.get("ETag", "")
        validator = etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")
        length = headers.get("Content-Length", "")
        if response.status != 200 or not length.isdecimal() or int(length) == 0:
            raise FetchError(f"{self._url}: status {response.status}, Content-Length {length!r}.")
        if headers.get("Accept-Ranges", "") != "bytes" or not validator:
            raise FetchError(f"{self._url}: the server must offer byte ranges and an ETag or Last-Modified.")
        return Source(self._url, int(length), validator)

    def fetch(self, source: Source, start: int, end: int) -> bytes:
        """Bytes from `start` up to `end`. Raises `FetchError`."""
        headers = {"Range": f"bytes={start}-{end - 1}", "If-Range": source.validator}
        response, data = self._retry("GET", headers)
        if response.status == 200:
            raise FetchError(f"{self._url} has changed on the server while it was in use.")
        span = f"bytes {start}-{end - 1}/{source.size}"
        if (
            response.status != 206
            or response.headers.get("Content-Range") != span
            or len(data) != end - start
        ):
            raise FetchError(f"{self._url}: status {response.status} for {span}.")
        return data

    def _retry(self, method: str, headers: dict[str, str]) -> tuple[http.client.HTTPResponse, bytes]:
        end = time.monotonic() + self._deadline_s
        while True:
            try:
                response, data = self._once(
                    method, headers, max(0.1, min(_ATTEMPT_S, end - time.monotonic()))
                )
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.status < 500 and response.status != 429:
                    return response, data
                reason = f"status {response.status}"
            if time.monotonic() + _PAUSE_S > end:
                raise FetchError(f"{self._url} could not be read for {self._deadline_s:g} s: {reason}.")
            time.sleep(_PAUSE_S)

    def _once(
        self, method: str, headers: dict[str, str], timeout_s: float
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
        try:
            connection.timeout = timeout_s
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            path = self._parts.path or "/"
            connection.request(
                method, f"{path}?{self._parts.query}" if self._parts.query else path, headers=headers
            )
            response = connection.getresponse()
            if response.status == 200 and method == "GET":
                connection.close()  # the whole of a file that was not asked for
                return response, b""
            return response, response.read()
        except BaseException:
            connection.close()
            self._local.connection = None
            raise

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port)


class Blocks:
    """Reads of one file, through a cache on disk that images and processes share."""

    def __init__(self, server: Server, source: Source, cache: Path, limit_bytes: int) -> None:
        self._server = server
        self.source = source
        self._cache = cache
        self._directory = cache / source.key
        self._directory.mkdir(parents=True, exist_ok=True)
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._busy: dict[int, threading.Lock] = {}
        self._since_eviction = limit_bytes
        self.fetched_bytes = 0
        self.failure = ""
        self.on_failure: Callable[[str], None] = lambda reason: None

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer at the end. Raises `FetchError`."""
        end = min(self.source.size, offset + size)
        pieces = []
        while offset < end:
            number = offset // BLOCK
            block = self._block(number)
            piece = block[offset - number * BLOCK : end - number * BLOCK]
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)

    def _block(self, number: int) -> bytes:
        if self.failure:
            raise FetchError(self.failure)
        with self._lock:
            busy = self._busy.setdefault(number, threading.Lock())
        with busy:
            if (data := self._kept(number)) is not None:
                return data
            start = number * BLOCK
            try:
                data = self._server.fetch(self.source, start, min(self.source.size, start + BLOCK))
            except FetchError as error:
                self.failure = str(error)
                self.on_failure(self.failure)
                raise
            self._keep(number, data)
            return data

    def _kept(self, number: int) -> bytes | None:
        path = self._directory / str(number)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        body = data[_DIGEST:]
        return body if hashlib.sha256(body).digest() == data[:_DIGEST] else None

    def _keep(self, number: int, data: bytes) -> None:
        """A cache that cannot be written only costs time."""
        with self._lock:
            self.fetched_bytes += len(data)
            self._since_eviction += len(data)
            evict = self._since_eviction >= self._limit // 8
            if evict:
                self._since_eviction = 0
        if evict:
            self._evict()
        partial = self._directory / f".{number}-{os.getpid()}-{threading.get_ident()}"
        with contextlib.suppress(OSError):
            partial.write_bytes(hashlib.sha256(data).digest() + data)
            partial.rename(self._directory / str(number))

    def _evict(self) -> None:
        """Remove the blocks that were used longest ago until an eighth of the limit is free."""
        found = []
        for path in self._cache.glob("*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit - self._limit // 8:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

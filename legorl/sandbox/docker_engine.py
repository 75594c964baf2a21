"""The few requests that a Docker engine is asked: each with a deadline, each failure named."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import aiodocker
import aiohttp
from aiodocker.stream import Stream

from legorl.config.schema_providers import DockerConfig
from legorl.errors import UserError

T = TypeVar("T")

REQUEST_S = 30.0
"""Of one request, unless its caller has less time."""
_REMOVE_S = 20.0
_POLL_S = 0.05
_WORDS = 40


class EngineFailedError(Exception):
    """The engine refused, or could not be asked."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP; 0 without an answer."""


def check_address(config: DockerConfig) -> None:
    """Raises `UserError`: there is no engine at a local address, or it is no address."""
    scheme, _, place = config.host.partition("://")
    if scheme == "unix" and not Path(place).is_socket():
        raise UserError(
            f"sandbox.docker.host={config.host}: no socket there. Start Docker, or name another "
            "address, such as unix:///run/podman/podman.sock or tcp://HOST:2376."
        )
    if scheme not in ("unix", "tcp", "http", "https"):
        raise UserError(f"sandbox.docker.host={config.host}: use unix://PATH or tcp://HOST:PORT.")


class AttachedStream:
    """Standard streams of a container's first process. See `ByteStream`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._errors: deque[bytes] = deque(maxlen=_WORDS)

    async def read(self) -> bytes:
        """See `ByteStream`."""
        while True:
            try:
                message = await self._stream.read_out()
            except aiohttp.ClientError as error:
                raise OSError(str(error)) from error
            if message is None:
                return b""
            if message.stream == 1:
                return bytes(message.data)
            self._errors.append(message.data)

    async def write(self, data: bytes) -> None:
        """See `ByteStream`."""
        try:
            await self._stream.write_in(data)
        except (
            aiohttp.ClientError,
            AssertionError,
            RuntimeError,
        ) as error:  # its words for a lost connection
            raise OSError("the connection to the engine was lost") from error

    async def close(self) -> None:
        """See `ByteStream`."""
        with contextlib.suppress(AssertionError, OSError, aiohttp.ClientError):
            await self._stream.close()

    def diagnosis(self) -> str:
        """See `ByteStream`."""
        return b"".join(self._errors).decode(errors="replace").strip()[-1000:]


class Engine:
    """A client. Make it inside the event loop that uses it."""

    def __init__(self, config: DockerConfig) -> None:
        self.host = config.host
        url, connector = _connection(config)
        self._client = aiodocker.Docker(url=url, connector=connector)

    async def create(self, body: Mapping[str, Any], name: str) -> None:
        """Make a container."""
        await self._ask(self._client.containers.create(dict(body), name=name))

    async def attach(self, name: str) -> AttachedStream:
        """Connect to a container's standard streams."""
        stream = self._client.containers.container(name).attach(stdin=True, stdout=True, stderr=True)
        await self._ask(stream.__aenter__())
        return AttachedStream(stream)

    async def start(self, name: str) -> None:
        """Start a container."""
        await self._ask(self._client.containers.container(name).start())

    async def remove(self, name: str) -> None:
        """Kill and remove a container, and wait until it is gone. One that is gone already is no failure."""
        container = self._client.containers.container(name)
        try:
            async with asyncio.timeout(_REMOVE_S):
                while True:
                    try:
                        await self._ask(container.delete(force=True, v=True))
                    except EngineFailedError as error:
                        if error.status == 404:
                            return
                        if error.status != 409:  # it is being removed
                            raise
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EngineFailedError(f"{name} was not removed within {_REMOVE_S:g} s") from None

    async def labels(self, label: str) -> list[tuple[str, str, dict[str, str]]]:
        """Id, state and labels of every container with this label."""
        found = await self._ask(self._client.containers.list(all=True, filters={"label": [label]}))
        return [(item.id, str(item["State"]), dict(item["Labels"])) for item in found]

    async def is_podman(self) -> bool:
        """It is Podman, which takes fewer options."""
        version = await self._ask(self._client.version())
        return any("podman" in str(part.get("Name", "")).lower() for part in version.get("Components") or ())

    async def image_exists(self, image: str) -> bool:
        """The engine has it."""
        try:
            await self._ask(self._client.images.inspect(image))
        except EngineFailedError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def build(self, context: IO[bytes], tag: str) -> AsyncIterator[dict[str, Any]]:
        """Build an image; what the engine says as it goes. The caller keeps the time."""
        lines = self._client.images.build(
            fileobj=context, encoding="identity", tag=tag, forcerm=True, stream=True
        )
        async for line in self._said(lines):
            yield line

    async def pull(self, image: str) -> AsyncIterator[dict[str, Any]]:
        """Pull an image; what the engine says as it goes. The caller keeps the time."""
        async for line in self._said(self._client.images.pull(image, stream=True)):
            yield line

    async def _said(self, lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        try:
            async for line in lines:
                yield line
        except aiodocker.exceptions.DockerError as error:
            raise EngineFailedError(error.message, error.status) from error
        except (OSError, aiohttp.ClientError) as error:
            raise EngineFailedError(f"the engine at {self.host} cannot be reached: {error}") from error

    async def close(self) -> None:
        """Close every connection."""
        await self._client.close()
        await self._client.connector.close()

    async def _ask(self, request: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(REQUEST_S):
                return await request
        except aiodocker.exceptions.DockerError as error:
            raise EngineFailedError(error.message, error.status) from error
        except TimeoutError:
            raise EngineFailedError(f"the engine at {self.host} did not answer in {REQUEST_S:g} s") from None
        except (OSError, aiohttp.ClientError) as error:
            raise EngineFailedError(f"the engine at {self.host} cannot be reached: {error}") from error


def _connection(config: DockerConfig) -> tuple[str, aiohttp.BaseConnector]:
    """Address and connections, whose number has no limit: every sandbox holds one."""
    scheme, _, place = config.host.partition("://")
    if scheme == "unix":
        return "unix://localhost", aiohttp.UnixConnector(place, limit=0)
    context: ssl.SSLContext | bool = True
    if config.certificates:
        directory = Path(config.certificates)
        try:
            context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
            context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
        except OSError as error:
            raise UserError(
                f"sandbox.docker.certificates={directory}: ca.pem, cert.pem or key.pem: {error}."
            ) from error
    secure = bool(config.certificates) or scheme == "https"
    return f"{'https' if secure else 'http'}://{place}", aiohttp.TCPConnector(limit=0, ssl=context)

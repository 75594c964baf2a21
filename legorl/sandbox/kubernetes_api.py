"""The few calls to a Kubernetes API server that sandboxes need, with deadlines, retries and real messages.

Invariant: what is tried again is safe to try again: reading, deleting, and creating under a name that is
unique, of which "already exists" then says that the first attempt had arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio import client
from kubernetes.aio import config as kubeconfig
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.stream import WsApiClient

from legorl.config.schema_kubernetes import KubernetesConfig
from legorl.errors import UserError

T = TypeVar("T")

_CALL_S = 15.0
_WATCH_S = 60.0
_ATTEMPTS = 4
_PAUSE_S = 0.3
_TRANSIENT = frozenset({429, 500, 502, 503, 504})
_NETWORK = (aiohttp.ClientError, OSError, TimeoutError)
_HEARTBEAT_S = 20.0


class ApiError(Exception):
    """The API server did not do it; the message is its own, or says why it could not be asked."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP; 0 where there was no answer."""


class Api:
    """One API server and namespace. Belongs to one event loop."""

    def __init__(self, config: KubernetesConfig) -> None:
        if config.kubeconfig and not Path(config.kubeconfig).is_file():
            raise UserError(f"sandbox.kubernetes.kubeconfig={config.kubeconfig}: there is no such file.")
        self._config = config
        self._in_cluster = Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists()
        self._opening = asyncio.Lock()
        self._core: client.CoreV1Api | None = None
        self._exec: client.CoreV1Api | None = None
        self.url = ""

    async def _open(self) -> client.CoreV1Api:
        async with self._opening:
            if self._core is None:
                settings = client.Configuration()
                try:
                    await self._load(settings)
                except Exception as error:  # a user's file, read by a library: YAML's errors, missing keys, …
                    place = self._config.kubeconfig or "kubectl's default"
                    why = " ".join(f"{type(error).__name__}: {error}".split())
                    raise UserError(
                        f"sandbox.kubernetes.kubeconfig: {place} is no usable configuration ({why})."
                    ) from error
                settings.connection_pool_maxsize = 0  # every sandbox keeps a connection
                self.url = settings.host
                self._exec = client.CoreV1Api(_websockets(settings))
                self._core = client.CoreV1Api(client.ApiClient(settings))
            return self._core

    async def _load(self, settings: client.Configuration) -> None:
        config = self._config
        if not config.kubeconfig and self._in_cluster:
            kubeconfig.load_incluster_config(client_configuration=settings)
            return
        await kubeconfig.load_kube_config(
            config.kubeconfig or None,
            context=config.context or None,
            client_configuration=settings,
            persist_config=False,
        )

    async def close(self) -> None:
        """Close connections."""
        for api in (self._core, self._exec):
            if api is not None:
                await api.api_client.close()
        self._core = self._exec = None

    async def create_pod(self, body: dict[str, Any]) -> None:
        """Create a pod of a name that nobody else uses. Raises `ApiError`."""
        core = await self._open()
        pod = client.V1Pod.from_dict(body)
        tried = 0

        async def create() -> None:
            nonlocal tried
            tried += 1
            try:
                await _json(
                    core.create_namespaced_pod_without_preload_content(
                        self._config.namespace, pod, _request_timeout=_CALL_S
                    )
                )
            except ApiException as error:
                if not (error.status == 409 and tried > 1):
                    raise

        await _attempt("create the pod", create)

    async def read_pod(self, name: str) -> dict[str, Any]:
        """The pod. Raises `ApiError`, with status 404 where there is none."""
        core = await self._open()

        async def read() -> dict[str, Any]:
            return await _json(
                core.read_namespaced_pod_without_preload_content(
                    name, self._config.namespace, _request_timeout=_CALL_S
                )
            )

        return await _attempt("read the pod", read)

    async def list_pods(self, selector: str) -> list[dict[str, Any]]:
        """Pods with these labels. Raises `ApiError`."""
        core = await self._open()

        async def read() -> dict[str, Any]:
            return await _json(
                core.list_namespaced_pod_without_preload_content(
                    self._config.namespace, label_selector=selector, _request_timeout=_CALL_S
                )
            )

        pods: list[dict[str, Any]] = (await _attempt("list pods", read))["items"]
        return pods

    async def delete_pod(self, name: str) -> None:
        """Delete at once; one that is gone is fine. Raises `ApiError`."""
        core = await self._open()

        async def delete() -> None:
            try:
                await _json(
                    core.delete_namespaced_pod_without_preload_content(
                        name, self._config.namespace, grace_period_seconds=0, _request_timeout=_CALL_S
                    )
                )
            except ApiException as error:
                if error.status != 404:
                    raise

        await _attempt("delete the pod", delete)

    async def watch_pod(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """The pod as it is, and whenever it changes, however often connections end. Raises `ApiError`."""
        core = await self._open()
        while True:
            pod = await self.read_pod(name)
            yield pod
            try:
                response = await core.list_namespaced_pod_without_preload_content(
                    self._config.namespace,
                    field_selector=f"metadata.name={name}",
                    resource_version=pod["metadata"]["resourceVersion"],
                    watch=True,
                    _request_timeout=_WATCH_S,
                )
                async with contextlib.aclosing(_lines(response)) as events:
                    async for event in events:
                        if event["type"] not in ("ADDED", "MODIFIED", "DELETED"):
                            break
                        yield event["object"]
            except (*_NETWORK, ApiException):
                await asyncio.sleep(_PAUSE_S)

    async def connect(self, name: str, container: str, command: list[str]) -> aiohttp.ClientWebSocketResponse:
        """Run a command in a container; channels 0 to 3 are its streams and status. Raises `ApiError`."""
        await self._open()
        assert self._exec is not None
        try:
            async with asyncio.timeout(_CALL_S):
                answer = await self._exec.connect_get_namespaced_pod_exec_without_preload_content(
                    name,
                    self._config.namespace,
                    container=container,
                    command=command,
                    stdin=True,
                    stdout=True,
                    stderr=True,
                    tty=False,
                )
                socket: aiohttp.ClientWebSocketResponse = await answer
                return socket
        except aiohttp.WSServerHandshakeError as error:
            text = f"cannot run a command in the pod: {error.status} {error.message}"
            raise ApiError(text, error.status) from error
        except ApiException as error:
            raise _api_error("run a command in the pod", error) from error
        except _NETWORK as error:
            raise ApiError(f"cannot run a command in the pod: {_words(error)}") from error


def _websockets(settings: client.Configuration) -> client.ApiClient:
    made: client.ApiClient = WsApiClient(settings, heartbeat=_HEARTBEAT_S)
    return made


async def _lines(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    try:
        async for line in response.content:
            yield json.loads(line)
    finally:
        response.close()


async def _json(call: Awaitable[aiohttp.ClientResponse]) -> dict[str, Any]:
    """An answer as it came; the client's own classes cost milliseconds per pod."""
    raw = await call
    data = await raw.read()
    if raw.status >= 400:
        failure = ApiException(status=raw.status, reason=raw.reason)
        failure.body = data.decode(errors="replace")
        raise failure
    value: dict[str, Any] = json.loads(data)
    return value


async def _attempt(what: str, call: Callable[[], Awaitable[T]]) -> T:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return await call()
        except ApiException as error:
            failure = _api_error(what, error)
            if error.status not in _TRANSIENT:
                raise failure from error
        except _NETWORK as error:
            failure = ApiError(f"cannot {what}: {_words(error)}")
        if attempt < _ATTEMPTS:
            await asyncio.sleep(_PAUSE_S * 2**attempt)
    raise failure


def _api_error(what: str, error: ApiException) -> ApiError:
    message = error.body or error.reason
    with contextlib.suppress(ValueError, TypeError, KeyError):
        message = json.loads(error.body or "")["message"]
    return ApiError(f"cannot {what}: the API server says {error.status}: {message}", error.status or 0)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__

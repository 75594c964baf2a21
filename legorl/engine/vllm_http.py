"""A vLLM server over HTTP as a `TokenEngine`: token ids in, `Sample` out.

Invariant (I1): ids, log-probabilities, weight versions and routing rows are what the server reported for
this very request; an answer from which one of them is missing is an error.

The server is vLLM >= 0.30 with `--enable-scale-out` (the endpoint `/inference/v1/generate`),
`--logprobs-mode processed_logprobs` and, for a mixture of experts, `--enable-return-routed-experts`.
`open` finds out.

*Weight versions.* Whoever updates the server's weights tells it the policy version
(`/update_weight_version`, or the `weight_version` of `/finish_weight_update`), and the server reports it:
with each reply where it can (spans of tokens, vLLM >= 0.32), else at `/weight_info`, which is asked before
and after each request. There is a version for every token or an error: a server that cannot say which
tokens came from which weights must be paused with `mode=wait` for an update. Both endpoints need
`VLLM_SERVER_DEV_MODE=1`. For a server whose weights never change the caller gives the version instead.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any, Self

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from legorl.engine.assemble import aborted, assemble
from legorl.engine.base import Sample, Sampling
from legorl.engine.calls import Calls
from legorl.errors import EngineDownError, EngineError

UNTOUCHED = "default"
"""The version that vLLM reports before anybody set one: the weights it started with, version 0."""
CHECK_TIMEOUT_S = 10.0
_PROBE = Sampling(top_k=1, max_tokens=1)
"""Sampled from the most likely token, or from the few whose logits tie: after processing its probability is
one over a small whole number, before it is whatever the policy says."""
_MOST_TIES = 8
_PROBE_PROMPT = (1, 2, 3)
"""Not token 0 alone: where that is the padding its embedding is zero, and all logits may tie."""


class VllmHttpEngine:
    """See the module. Made by `open`.

    Args:
        url: of the server, `http://host:port`.
        timeout_s: deadline of one request, waiting in the server's queue included.
        routed: the policy is a mixture of experts whose routing is wanted: a reply without it is an error.
        weight_version: of a server whose weights never change; None: the server says.
    """

    def __init__(
        self, url: str, *, timeout_s: float, routed: bool = False, weight_version: int | None = None
    ) -> None:
        self.name = f"Engine {url}"
        self._url = url.rstrip("/")
        self._routed = routed
        self._fixed_version = weight_version
        self._calls = Calls(self.name, timeout_s)
        self._http: aiohttp.ClientSession | None = None

    @classmethod
    async def open(
        cls, url: str, *, timeout_s: float, routed: bool = False, weight_version: int | None = None
    ) -> Self:
        """Connect, and sample a token to see that the server is set up as the module says.

        Raises:
            EngineError: it is not, or it does not answer.
        """
        engine = cls(url, timeout_s=timeout_s, routed=routed, weight_version=weight_version)
        try:
            sample = await engine.generate("open", _PROBE_PROMPT, _PROBE)
            ways = float(np.exp(-sample.logprobs[0]))
            if abs(ways - round(ways)) > 1e-3 or ways > _MOST_TIES:
                raise EngineError(
                    f"{engine.name} reports log-probabilities before temperature, top_p and top_k: start it "
                    "with --logprobs-mode processed_logprobs."
                )
        except BaseException:
            await engine.close()
            raise
        return engine

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        routed_from: int = 0,
        sticky: str = "",
    ) -> Sample:
        """See `TokenEngine.generate`."""
        prompt = np.ascontiguousarray(prompt_ids, dtype=np.int32)
        sample = await self._calls.run(request_id, self._sample(request_id, prompt, sampling, routed_from))
        return aborted(routed_from) if sample is None else sample

    async def abort(self, request_id: str) -> None:
        """See `TokenEngine.abort`: the connection is closed, on which the server stops the request."""
        await self._calls.abort(request_id)

    async def check(self) -> None:
        """Whether the server is alive.

        Raises:
            EngineError: it is not.
        """
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await self._send("GET", "/health")
        except TimeoutError as error:
            raise EngineError(f"{self.name} did not answer /health in {CHECK_TIMEOUT_S:g} s.") from error

    async def close(self) -> None:
        """Stop what is in flight. The server goes on."""
        await self._calls.close()
        if self._http is not None:
            await self._http.close()

    async def _sample(
        self, request_id: str, prompt: NDArray[np.int32], sampling: Sampling, routed_from: int
    ) -> Sample:
        before = await self._version()
        body = {
            "request_id": request_id,
            "token_ids": prompt,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": sampling.max_tokens,
                "logprobs": 0,
                "detokenize": False,
                "routed_experts_prompt_start": routed_from,
            },
        }
        answer = await self._send("POST", "/inference/v1/generate", body)
        try:
            choice = answer["choices"][0]
            ids = np.array(choice["token_ids"], np.int32)
            logprobs = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)
            rows = _rows(choice.get("routed_experts"))
            finish = choice["finish_reason"]
            versions = self._spans(choice.get("weight_versions"), len(ids))
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, binascii.Error) as error:
            raise EngineError(
                f"{self.name} gave request {request_id} an answer that cannot be read: {error!r}."
            ) from error
        if versions is None:
            versions = np.full(len(ids), await self._still(before), np.int32)
        return assemble(
            self.name,
            prompt_tokens=len(prompt),
            sampling=sampling,
            token_ids=ids,
            logprobs=logprobs,
            weight_version=versions,
            finish=finish,
            routed_experts=rows,
            routed_from=routed_from,
            routed=self._routed,
        )

    async def _version(self) -> int:
        if self._fixed_version is not None:
            return self._fixed_version
        answer = await self._send("GET", "/weight_info")
        return self._number(answer.get("weight_version"))

    def _number(self, version: object) -> int:
        text = "0" if version == UNTOUCHED else str(version)
        if not text.isdecimal():
            raise EngineError(
                f"{self.name} reports weight version {version!r}, which is no policy version: whoever "
                "updates its weights must set the number of the step with /update_weight_version."
            )
        return int(text)

    def _spans(self, spans: Sequence[Mapping[str, Any]] | None, count: int) -> NDArray[np.int32] | None:
        if self._fixed_version is not None or spans is None:
            return None
        versions = np.full(count, -1, np.int32)
        for span in spans:
            versions[span["start"] : span["end"]] = self._number(span["version"])
        if (versions < 0).any():
            raise ValueError(f"weight versions {spans} do not cover {count} tokens")
        return versions

    async def _still(self, before: int) -> int:
        """The version after a reply, which must be the one before it."""
        try:
            after = await self._version()
        except EngineDownError as error:  # of a request that it did take
            raise EngineError(str(error)) from error
        if before != after:
            raise EngineError(
                f"The weights of {self.name} changed from version {before} to {after} "
                "during a request, and it does not say which tokens came from which: pause it with mode=wait "
                "for an update, or serve with vLLM >= 0.32."
            )
        return before

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object of the answer; an empty one where there is no body."""
        if self._http is None:
            # One connection per request: closing it stops that request and nothing else, and no kept one
            # can be closed by the server in the moment in which it is used again.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._http = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=CHECK_TIMEOUT_S)
            )
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {"content-type": "application/json"}
        try:
            async with self._http.request(
                method, self._url + path, data=data, headers=headers, allow_redirects=False
            ) as response:
                status, raw = response.status, await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineDownError(f"{self.name} cannot be reached: {error}. Is it running?") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"{self.name} broke off {method} {path}: {error!r}. It has probably died; see its log."
            ) from error
        if status != 200:
            raise EngineError(
                f"{self.name} answered {method} {path} with {status}{_hint(path, status)}: {_head(raw)}"
            )
        try:
            answer = orjson.loads(raw) if raw else {}
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{self.name} answered {path} with no JSON ({error}): {_head(raw)}") from error
        if not isinstance(answer, dict):
            raise EngineError(f"{self.name} answered {path} with no JSON object: {_head(raw)}")
        return answer


def _rows(encoded: str | None) -> NDArray[Any] | None:
    if encoded is None:
        return None
    rows = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    assert isinstance(rows, np.ndarray)
    return rows


def _hint(path: str, status: int) -> str:
    if status not in (403, 404):
        return ""
    if path == "/weight_info":
        return " (start it with VLLM_SERVER_DEV_MODE=1, or give the version of weights that never change)"
    return " (start it with --enable-scale-out)"


def _head(raw: bytes) -> str:
    return raw[:300].decode(errors="replace") or "(empty)"

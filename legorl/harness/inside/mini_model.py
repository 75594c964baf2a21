"""mini-swe-agent's model class for the proxy (its extension point: a model class by import path).

Runs in the sandbox, or in the fork server that enters it. Messages, tool calls and their ids go back as they
came; only the transport differs from mini's own requests-based class: another address, one attempt
(the proxy retries where that is right), a long timeout, and refusals named by the proxy's error code.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import requests
from minisweagent.models.openrouter_model import OpenRouterModel
from minisweagent.models.utils.actions_toolcall import BASH_TOOL

_TIMEOUT_S = (10.0, 3600.0)
"""To connect, and between bytes: the deadline of the trial is the real limit."""


class RequestRefusedError(Exception):
    """The proxy refused or failed; the message is `<error code>: <text>`."""


class ProxyModel(OpenRouterModel):  # type: ignore[misc]  # untyped package
    """Chat completions with mini's bash tool at `<base_url>/v1`; the token is in `OPENAI_API_KEY`.

    `model_kwargs` of a configuration are not sent: the run sets sampling, not the harness.
    """

    abort_exceptions: ClassVar[list[type[BaseException]]] = [
        *OpenRouterModel.abort_exceptions,
        RequestRefusedError,
    ]

    def __init__(self, *, base_url: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._api_url = f"{base_url}/v1/chat/completions"
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"

    def _query(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        body = {"model": self.config.model_name, "messages": messages, "tools": [BASH_TOOL], **kwargs}
        try:
            response = self._session.post(self._api_url, json=body, timeout=_TIMEOUT_S)
            if response.ok:
                return response.json()
            error = response.json()["error"]
        except (requests.RequestException, ValueError, KeyError) as failure:
            raise RequestRefusedError(f"transport: {type(failure).__name__}: {failure}") from failure
        code = error.get("code") or error.get("type") or response.status_code
        raise RequestRefusedError(f"{code}: {error.get('message', '')}")

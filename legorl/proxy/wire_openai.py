"""What the two OpenAI protocols share: the shape of errors, and the list of models."""

from __future__ import annotations

from legorl.proxy.messages import Json
from legorl.proxy.refusal import Reason, Refusal
from legorl.proxy.wire import WireFormat

_ERROR_TYPES: dict[Reason, tuple[str, str | None]] = {
    Reason.INVALID: ("invalid_request_error", None),
    Reason.OVERFLOW: ("invalid_request_error", "context_length_exceeded"),
    Reason.UNAUTHENTICATED: ("authentication_error", "invalid_api_key"),
    Reason.FORBIDDEN: ("permission_error", "permission_denied"),
    Reason.NOT_FOUND: ("invalid_request_error", "not_found"),
    Reason.METHOD: ("invalid_request_error", "method_not_allowed"),
    Reason.TIMEOUT: ("invalid_request_error", "request_timeout"),
    Reason.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    Reason.ENCODING: ("invalid_request_error", "unsupported_encoding"),
    Reason.BUSY: ("rate_limit_error", "rate_limit_exceeded"),
    Reason.HEADERS: ("invalid_request_error", "headers_too_large"),
    Reason.BROKEN: ("server_error", "engine_failure"),
}


class OpenAI(WireFormat):
    """See the module."""

    call_id_prefix = "call_"

    def error(self, refusal: Refusal) -> Json:
        """See `WireFormat.error`."""
        kind, code = _ERROR_TYPES[refusal.reason]
        message = refusal.message
        if refusal.reason is Reason.OVERFLOW:  # many clients know it by these words, not by its code
            message = f"This model's maximum context length is exceeded: {message}. Shorten the messages."
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}

    def models(self) -> Json:
        """See `WireFormat.models`."""
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "legorl"}
        return {"object": "list", "data": [model]}

    def token_count(self, count: int) -> Json:
        """See `WireFormat.token_count`."""
        return {"object": "response.input_tokens", "input_tokens": count}

"""Why a request gets no reply: one table, which each wire renders in its protocol's own shape."""

from __future__ import annotations

from enum import Enum

_LENGTH = 1000


class Reason(Enum):
    """Name and HTTP status of a refusal."""

    INVALID = ("invalid", 400)
    OVERFLOW = ("overflow", 400)
    """The context window, or a budget of the trial, is used up; harnesses know this error as final."""
    UNAUTHENTICATED = ("unauthenticated", 401)
    FORBIDDEN = ("forbidden", 403)
    NOT_FOUND = ("not_found", 404)
    METHOD = ("method", 405)
    TIMEOUT = ("timeout", 408)
    """The client stopped sending in the middle of a request."""
    TOO_LARGE = ("too_large", 413)
    ENCODING = ("encoding", 415)
    BUSY = ("busy", 429)
    """The only one that asking again can help."""
    HEADERS = ("headers", 431)
    BROKEN = ("broken", 500)
    """The engine or the proxy failed, or the trial is closing; asking again cannot help."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.value[1]


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, reason: Reason, message: str) -> None:
        self.message = message if len(message) <= _LENGTH else message[:_LENGTH] + "…"
        """Cut: it may quote what a client sent."""
        super().__init__(self.message)
        self.reason = reason


def invalid(message: str) -> Refusal:
    """A malformed request; the message names the field."""
    return Refusal(Reason.INVALID, message)

"""The open trials, by name and by token.

Invariant: what a request learns depends on its own token only: a trial that is not open and one of somebody
else look the same, and so do their times. Tokens are looked up by their hash, so that no comparison tells
how much of a guess was right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from legorl.errors import ProxyError
from legorl.proxy.refusal import Reason, Refusal
from legorl.proxy.session import Session


class Sessions:
    """See the module."""

    def __init__(self) -> None:
        self._by_trial: dict[str, Session] = {}
        self._by_token: dict[bytes, Session] = {}

    def __iter__(self) -> Iterator[str]:
        """Names of the open trials, as they are now."""
        return iter(list(self._by_trial))

    def add(self, session: Session) -> None:
        """Let its token in. Raises `ProxyError` where a trial of this name is open."""
        if session.trial in self._by_trial:
            raise ProxyError(f"Trial {session.trial} is open already.")
        self._by_trial[session.trial] = session
        self._by_token[_hash(session.token)] = session

    def remove(self, trial: str) -> Session:
        """Let its token in no more. Raises `ProxyError` where no such trial is open."""
        session = self._by_trial.pop(trial, None)
        if session is None:
            raise ProxyError(f"Trial {trial} is not open.")
        del self._by_token[_hash(session.token)]
        return session

    def authenticate(self, trial: str, tokens: Sequence[str]) -> Session:
        """The session of the trial named in an address, for a request that carries its token.

        Raises:
            Refusal: unauthenticated without the token of an open trial, forbidden with another one's.
        """
        known = [self._by_token.get(_hash(token)) for token in tokens]
        for session in known:
            if session is not None and session.trial == trial:
                return session
        if any(known):
            raise Refusal(Reason.FORBIDDEN, "this token is not for this address")
        raise Refusal(Reason.UNAUTHENTICATED, "missing or invalid token")


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()

"""The proxy: sessions of open trials, and the sockets they are served on.

Invariant: `open`, `close` and the ledger are methods of this object and of nothing that listens. Each
attached socket lies in one sandbox's network namespace and serves the same application.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from legorl.engine.base import ReplyParser, Sampling, TokenEngine
from legorl.proxy.app import HEARTBEAT_S, App
from legorl.proxy.ledger import Ledger
from legorl.proxy.listener import Listener
from legorl.proxy.render import Renderer
from legorl.proxy.session import Serving, Session, SpeakerOf
from legorl.proxy.sessions import Sessions


class Proxy:
    """See the module. `sandbox.base.ProxyEndpoint` is its socket side."""

    def __init__(
        self,
        engine: TokenEngine,
        renderer: Renderer,
        parser: ReplyParser,
        *,
        context_tokens: int,
        heartbeat_s: float = HEARTBEAT_S,
        observed: bool = False,
    ) -> None:
        self._serving = Serving(engine, renderer, parser, context_tokens, observed)
        self._sessions = Sessions()
        self._app = App(self._sessions, heartbeat_s)
        self._listeners: dict[socket.socket, Listener] = {}

    def open(
        self,
        trial_id: str,
        *,
        speaker: SpeakerOf,
        sampling: Sampling,
        turn_limit: int,
        trial_tokens: int,
        new_call_id: Callable[[], str] | None = None,
    ) -> Session:
        """Open a trial at `/t/{trial_id}`; its harness authenticates with the session's `token`.

        Args:
            speaker: `(headers, body) -> Speaker`, the harness adapter's.
            sampling: of every reply; `max_tokens` is the most tokens of one.
            turn_limit: replies on the main thread.
            trial_tokens: sampled tokens on all threads.
            new_call_id: source of tool-call ids (a replay issues recorded ones); random by default.

        Raises:
            ProxyError: the trial is open already.
        """
        session = Session(
            trial_id,
            self._serving,
            speaker=speaker,
            sampling=sampling,
            turn_limit=turn_limit,
            trial_tokens=trial_tokens,
            new_call_id=new_call_id,
        )
        self._sessions.add(session)
        return session

    async def close(self, trial_id: str) -> Ledger:
        """End a trial: abort its requests and return its ledger.

        Raises:
            ProxyError: no such trial is open.
        """
        return await self._sessions.remove(trial_id).close()

    async def attach(self, sock: socket.socket) -> None:
        """Serve on this listening socket too. The proxy owns it until `detach`."""
        listener = Listener(self._app)
        self._listeners[sock] = listener
        await listener.start(sock)

    async def detach(self, sock: socket.socket) -> None:
        """Stop serving on the socket and close it."""
        listener = self._listeners.pop(sock, None)
        if listener is not None:
            await listener.stop()
        with contextlib.suppress(OSError):
            sock.close()

    async def aclose(self) -> None:
        """Close every trial and every socket. The engine is not the proxy's to close."""
        for trial_id in self._sessions:
            await self.close(trial_id)
        for sock in list(self._listeners):
            await self.detach(sock)

"""A proxy over a scripted engine, on a real socket."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from legorl.engine.base import Sampling
from legorl.engine.scripted import ScriptedEngine
from legorl.harness.base import Speaker, ThreadKind
from legorl.proxy.proxy import Proxy
from legorl.proxy.render import Renderer
from legorl.proxy.session import Session
from tests.proxy.models import HermesLike, write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> Renderer:
    """Its renderer."""
    return Renderer.load(model_dir)


@dataclass
class Stage:
    """A running proxy whose policy plays `script`, then repeats its last line."""

    renderer: Renderer
    script: list[str] = field(default_factory=lambda: ["Hello."])
    prompts: list[str] = field(default_factory=list)
    hold: Callable[[], Awaitable[None]] | None = None
    """Awaited before each reply."""
    proxy: Proxy = field(init=False)
    engine: ScriptedEngine = field(init=False)
    port: int = 0

    async def play(self, prompt: str, rng: Random) -> str:
        """The policy."""
        self.prompts.append(prompt)
        if self.hold is not None:
            await self.hold()
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def open(
        self,
        trial: str = "a",
        *,
        turn_limit: int = 50,
        trial_tokens: int = 100_000,
        max_tokens: int = 200,
    ) -> Session:
        """Open a trial whose every request is the main thread's, but for those with a `x-thread` header."""
        return self.proxy.open(
            trial,
            speaker=speaker_of_test,
            sampling=Sampling(max_tokens=max_tokens),
            turn_limit=turn_limit,
            trial_tokens=trial_tokens,
        )

    def url(self, trial: str = "a") -> str:
        """Base URL of a trial, without `/v1`."""
        return f"http://127.0.0.1:{self.port}/t/{trial}"


def speaker_of_test(headers: object, body: object) -> Speaker:
    """Main, or a side thread named by the header `x-thread`."""
    assert isinstance(headers, dict)
    key = headers.get("x-thread")
    return Speaker(ThreadKind.SIDE, key=key) if key else Speaker(ThreadKind.MAIN)


@pytest.fixture
async def stage(renderer: Renderer) -> AsyncIterator[Stage]:
    """A proxy with routing rows on, listening on a free port."""
    stage = Stage(renderer)
    stage.engine = ScriptedEngine(stage.play, renderer.tokenizer, routing=(2, 2, 8))
    stage.proxy = Proxy(stage.engine, renderer, HermesLike(), context_tokens=4096, heartbeat_s=0.2)
    sock = socket.create_server(("127.0.0.1", 0))
    stage.port = sock.getsockname()[1]
    await stage.proxy.attach(sock)
    yield stage
    await stage.proxy.aclose()
    assert not stage.engine.running

"""The engines that sample with a real vLLM, held to what every engine must do, and their deaths."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import pytest_asyncio

from legorl.config.compose import compose
from legorl.engine.base import Sampling, TokenEngine
from legorl.engine.vllm_http import VllmHttpEngine
from legorl.errors import EngineDownError, EngineError
from legorl.trainer import environment
from tests.engine.conformance import PROMPT, DeadlineConformance, EngineConformance, Subject
from tests.engine.vllm_server import CONTEXT, ENVIRONMENT, VllmServer, random_moe, running
from tests.trainer.rays import balancer, local_ray

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]
ON_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")
"""An engine lives in the event loop that it was made in."""
pytest.importorskip("vllm")

ENDLESS = Sampling(temperature=0.02, max_tokens=CONTEXT - 16)
"""Almost greedy: an untrained policy goes round in circles and finds no end."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained mixture of experts."""
    return random_moe(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """It, served."""
    with VllmServer(model_dir, tmp_path_factory.mktemp("server") / "log.txt") as server:
        yield server


@pytest_asyncio.fixture(scope="class", loop_scope="module")
async def over_http(server: VllmServer) -> AsyncIterator[Subject]:
    engine = await VllmHttpEngine.open(server.url, timeout_s=120, routed=True)

    async def count() -> int:
        # The gauge is set when a step ends, so there must be one.
        await engine.generate("nudge", [1], Sampling(max_tokens=1))
        text = (await asyncio.to_thread(server.get, "/metrics")).decode()
        found = re.search(r"^vllm:num_requests_running\{.*?\} (\S+)$", text, re.MULTILINE)
        assert found
        return int(float(found[1]))

    yield Subject(engine, count, ENDLESS)
    await engine.close()


@ON_ONE_LOOP
class TestVllmHttp(EngineConformance, DeadlineConformance):
    """vLLM over HTTP."""

    @pytest.fixture
    def subject(self, over_http: Subject) -> Subject:
        return over_http

    @pytest_asyncio.fixture(loop_scope="module")
    async def hasty(self, server: VllmServer) -> AsyncIterator[TokenEngine]:
        engine = VllmHttpEngine(server.url, timeout_s=0.5, routed=True)
        yield engine
        await engine.close()

    async def test_the_server_says_its_weight_version(self, subject: Subject, server: VllmServer) -> None:
        for version, told in ((7, b'{"new_version": "7"}'), (0, b'{"new_version": "default"}')):
            await asyncio.to_thread(server.get, "/update_weight_version", told)
            sample = await subject.sample(f"version{version}", PROMPT, Sampling(max_tokens=3))
            assert set(sample.weight_version.tolist()) == {version}

    async def test_new_weights_within_a_reply_are_an_error(
        self, subject: Subject, server: VllmServer
    ) -> None:
        task = await subject.begin("mixed")
        await asyncio.to_thread(server.get, "/update_weight_version", b'{"new_version": "8"}')
        await asyncio.to_thread(server.get, "/abort_requests", b"{}")  # ends the reply
        with pytest.raises(EngineError, match="changed from version 0 to 8"):
            await task
        await asyncio.to_thread(server.get, "/update_weight_version", b'{"new_version": "default"}')

    async def test_death_is_an_engine_error(self, subject: Subject, server: VllmServer) -> None:
        """The last test of the class: frozen, killed, and back."""
        engine = VllmHttpEngine(server.url, timeout_s=3, routed=True)
        server.freeze()
        try:
            with pytest.raises(EngineError, match="within 3 s"):
                await engine.generate("frozen", PROMPT, Sampling(max_tokens=1))
        finally:
            server.thaw()
        await engine.check()
        task = await subject.begin("killed")
        left = server.processes()
        await asyncio.to_thread(server.kill)
        with pytest.raises(EngineError, match="broke off"):
            await task
        with pytest.raises(EngineDownError, match="cannot be reached"):
            await engine.generate("refused", PROMPT, Sampling(max_tokens=1))
        with pytest.raises(EngineDownError):
            await engine.check()
        _, alive = await asyncio.to_thread(psutil.wait_procs, left, timeout=20)
        assert not alive
        server.start()
        await engine.check()
        assert len((await engine.generate("back", PROMPT, Sampling(max_tokens=2))).token_ids) == 2
        await engine.close()


@pytest_asyncio.fixture(scope="class", loop_scope="module")
async def in_process(model_dir: Path) -> AsyncIterator[Subject]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        from legorl.engine.vllm import VllmEngine

        engine = VllmEngine.start(
            model_dir,
            dtype="float32",
            max_model_len=CONTEXT,
            max_num_seqs=16,
            kv_cache_gb=0.5,
            timeout_s=120,
            routed=True,
            weight_version=3,
        )

    yield Subject(engine, lambda: running(engine), ENDLESS, version=3)
    await engine.close()


@ON_ONE_LOOP
class TestVllm(EngineConformance, DeadlineConformance):
    """vLLM in this process."""

    @pytest.fixture
    def subject(self, in_process: Subject) -> Subject:
        return in_process

    @pytest.fixture
    def hasty(self, subject: Subject) -> TokenEngine:
        from legorl.engine.vllm import VllmEngine

        assert isinstance(subject.engine, VllmEngine)
        return VllmEngine(subject.engine.llm, "Engine hasty", timeout_s=0.5, routed=True, weight_version=3)

    async def test_death_is_an_engine_error(self, subject: Subject) -> None:
        """The last test of the class: its core is killed."""
        from legorl.engine.vllm import VllmEngine

        engine = subject.engine
        assert isinstance(engine, VllmEngine)
        # By vLLM's own book: where the title of a process cannot be set, the core is called as its parent.
        (core,) = engine.llm.engine_core.resources.engine_manager.processes
        await engine.check()
        task = await subject.begin("killed")
        os.kill(core.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="died during request killed"):
            await task
        with pytest.raises(EngineDownError, match="is dead"):
            await engine.generate("late", PROMPT, Sampling(max_tokens=1))
        with pytest.raises(EngineDownError):
            await engine.check()


@pytest_asyncio.fixture(scope="class", loop_scope="module")
async def through_verl(model_dir: Path) -> AsyncIterator[Subject]:
    environment.set_up(compose([]))
    import ray

    from legorl.trainer.engine import SyncClient, VerlEngine
    from tests.engine.verl_server import VERSION, VerlServer

    with local_ray({**ENVIRONMENT, "LEGORL_FORK_ENGINE_CORE": "0"}):
        server = ray.remote(VerlServer).options(num_cpus=0).remote(str(model_dir), CONTEXT)
        rollout = SimpleNamespace(full_determinism=False, name="vllm")
        client = SyncClient(
            config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)),
            load_balancer_handle=balancer(server),
        )
        assert await server.running_requests.remote() == 0  # it is up

        async def count() -> int:
            return int(await server.running_requests.remote())

        engine = VerlEngine(client, timeout_s=120, routed=True)
        yield Subject(engine, count, ENDLESS, version=VERSION)
        await engine.close()


@ON_ONE_LOOP
class TestVerl(EngineConformance, DeadlineConformance):
    """verl's client and load balancer, and its rollout server around a real vLLM, in Ray actors."""

    @pytest.fixture
    def subject(self, through_verl: Subject) -> Subject:
        return through_verl

    @pytest.fixture
    def hasty(self, subject: Subject) -> TokenEngine:
        from legorl.trainer.engine import VerlEngine

        assert isinstance(subject.engine, VerlEngine)
        return VerlEngine(subject.engine._client, timeout_s=0.5, routed=True)


def test_the_core_ends_with_its_process_by_whatever_signal(model_dir: Path) -> None:
    keeper = subprocess.Popen(
        [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "--",
            sys.executable,
            "-m",
            "tests.engine.vllm_keeper",
            str(model_dir),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
        text=True,
    )
    try:
        assert keeper.stdout is not None
        line = next(line for line in keeper.stdout if re.fullmatch(r"[\d ]+\n", line))
        children = [psutil.Process(int(pid)) for pid in line.split()]
        assert any("EngineCore" in child.name() for child in children)
    finally:
        keeper.kill()
        keeper.wait(10)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]

"""What the proxy recorded is what the engine would say again: a multi-turn, forked, tool-using trial of a
tiny Qwen3-MoE in a real vLLM, through the real proxy, against fresh teacher-forced passes over its
rows.

In fp32 every recorded log-probability equals that of one fresh full pass to 1e-4, by vLLM itself and by
transformers, and the recorded routing equals the fresh one row for row. In bf16 vLLM agrees with itself,
in the mean at least; another implementation in fp32 does not, and sends some tokens to other experts,
which is why the trainer replays the recorded routing.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from legorl.config.schema import ModelConfig, WarmStartConfig
from legorl.engine.base import Sampling
from legorl.engine.vllm_parser import vllm_parser
from legorl.harness.base import Speaker, ThreadKind
from legorl.policy.expert import Expert, Mode
from legorl.policy.model import build_model, save_policy
from legorl.policy.tokenizer import BASH_TOOL, corpus, train_tokenizer
from legorl.policy.warm_start import Transcript, warm_start
from legorl.proxy import invariants
from legorl.proxy.proxy import Proxy
from legorl.proxy.render import Renderer
from legorl.proxy.row import Row
from tests.engine.vllm_server import CONTEXT, ENVIRONMENT, tiny_moe
from tests.policy.simulator import SYSTEM, draft, run_episode

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]
pytest.importorskip("vllm")

TOLERANCE = 1e-4
"""Nats, at every loss token, in fp32."""
TURNS, MOST_TURNS = 6, 30
"""Of the main thread before its history is edited: so many at least, until there were `CALLS` tool calls."""
CALLS = 4


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has seen the expert call its tool a few times: it does so itself, more or less."""
    config = tiny_moe()
    rng = random.Random(0)
    tokenizer = train_tokenizer(corpus(draft(number).instruction for number in range(60)), config.vocabulary)
    transcripts = []
    for number in range(120):
        pieces = run_episode(draft(number), Expert(Mode.SLOPPY), rng).written
        encoded = [(tokenizer.encode(text, add_special_tokens=False).ids, mine) for text, mine in pieces]
        ids = [token for tokens, _ in encoded for token in tokens]
        mask = [mine for tokens, mine in encoded for _ in tokens]
        transcripts.append(Transcript(np.array(ids, np.int32), np.array(mask), Mode.SLOPPY))
    model = build_model(config, tokenizer, 0)
    warm_start(model, tokenizer, transcripts, WarmStartConfig(steps=120, batch=8), threads=1)
    return save_policy(model, tokenizer, config, tmp_path_factory.mktemp("policy") / "tiny")


@dataclass
class Agent:
    """A harness of ours over real HTTP: it runs what the policy asks for, and edits its history."""

    client: Any
    thread: str = "main"
    messages: list[Any] = field(default_factory=list)
    calls: int = 0

    async def turn(self, output: str) -> None:
        """Ask; answer each call with `output`, a reply without one with a complaint."""
        answer = await self.client.chat.completions.create(
            model="any", messages=self.messages, tools=[BASH_TOOL], extra_headers={"x-thread": self.thread}
        )
        message = answer.choices[0].message
        calls = message.tool_calls or []
        echo: dict[str, Any] = {"role": "assistant", "content": message.content}
        if calls:  # as harnesses do: the arguments go through their own JSON
            echo["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.dumps(json.loads(call.function.arguments), separators=(",", ":")),
                    },
                }
                for call in calls
            ]
        self.messages.append(echo)
        self.calls += len(calls)
        for call in calls:
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        if not calls:
            self.messages.append({"role": "user", "content": "error: no tool call"})


def opening(number: int) -> list[Any]:
    """System and user message of a task."""
    text = f"Please solve this issue: {draft(number).instruction}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


async def work(client: Any) -> int:
    """The trial: turns with tools, a subagent, an edited past, a shortened one. Returns tool calls."""
    main = Agent(client, messages=opening(101))
    cut = 0
    for turn in range(MOST_TURNS):
        await main.turn(f"E assert check({turn}, 1) == 2 got 3\n{turn + 1} failed, 2 passed")
        if not cut and turn >= 2 and main.messages[-1]["role"] == "tool":
            cut = len(main.messages)
        if turn >= TURNS and main.calls >= CALLS:
            break
    sub = Agent(client, "sub", opening(102))
    await asyncio.gather(sub.turn("4 passed"), main.turn("1 failed, 3 passed"))
    edited = Agent(client, messages=[*main.messages[: cut - 1], {**main.messages[cut - 1]}])
    edited.messages[-1]["content"] = "2 failed, 2 passed\nE assert f(7, 7) == 49 got 14"
    for _ in range(2):
        await edited.turn("(no output)")
    summary = {"role": "user", "content": "4 failed, 0 passed so far. Go on."}
    shortened = Agent(client, messages=[*main.messages[:2], summary])  # a compaction
    for _ in range(2):
        await shortened.turn("4 passed")
    await sub.turn("4 passed")
    return sum(agent.calls for agent in (main, sub, edited, shortened))


def speaker(headers: Any, body: Any) -> Speaker:
    """By a header of ours."""
    if headers["x-thread"] == "sub":
        return Speaker(ThreadKind.SUBAGENT, key="sub", parent="main")
    return Speaker(ThreadKind.MAIN)


async def record(engine: Any, policy: Path, trial: str) -> list[Row]:
    """Rows of one trial, as the proxy gives them to the trainer."""
    from openai import AsyncOpenAI

    proxy = Proxy(
        engine,
        Renderer.load(policy),
        vllm_parser(ModelConfig(), policy),
        context_tokens=CONTEXT,
    )
    sock = socket.create_server(("127.0.0.1", 0))
    await proxy.attach(sock)
    try:
        session = proxy.open(
            trial, speaker=speaker, sampling=Sampling(max_tokens=64), turn_limit=50, trial_tokens=10_000
        )
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/t/{trial}/v1"
        async with AsyncOpenAI(base_url=url, api_key=session.token, max_retries=0, timeout=120) as client:
            calls = await work(client)
        ledger = await proxy.close(trial)
    finally:
        await proxy.aclose()
    assert invariants.check(ledger) == []
    assert calls >= CALLS, f"the policy called its tool {calls} times only"
    kinds = [turn.kind for turn in ledger.turns]
    assert kinds.count("fork") >= 2 and kinds.count("extend") >= TURNS, kinds
    rows = ledger.rows(tuple(ledger.threads))
    assert len(rows) >= 4
    return rows


@dataclass
class Fresh:
    """One full pass over a row. `logprobs` float32 [T], NaN at 0; `routed` uint8 [T-1, L, K]."""

    logprobs: NDArray[np.float32]
    routed: NDArray[Any]


async def forced_by_vllm(engine: Any, row: Row, name: str) -> Fresh:
    """The row as one prompt. vLLM reads no cached prefix for a request with prompt log-probs."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
    prompt = TokensPrompt(prompt_token_ids=row.token_ids.tolist())
    async for last in engine.llm.generate(prompt, params, name):
        output = last
    assert not output.num_cached_tokens
    given = [
        at[int(token)].logprob if at else np.nan
        for token, at in zip(row.token_ids, output.prompt_logprobs, strict=True)
    ]
    return Fresh(np.array(given, np.float32), output.outputs[0].routed_experts[: len(row.token_ids) - 1])


def forced_by_transformers(model: Any, row: Row) -> Fresh:
    """The same by another implementation."""
    import torch

    chosen: list[Any] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    for hook in hooks:
        hook.remove()
    logprobs = scores.gather(1, ids[0, 1:, None])[:, 0].numpy()
    routed = torch.stack([at.reshape(len(row.token_ids), -1) for at in chosen], 1)[:-1].numpy()
    return Fresh(np.concatenate([[np.nan], logprobs]).astype(np.float32), routed)


@dataclass
class Differences:
    """Between what was recorded and fresh passes, over all loss tokens of a trial."""

    logprobs: NDArray[np.float32]
    """Absolute, nats."""
    routes: NDArray[np.bool_]
    """[rows, L]: another set of experts."""

    def __str__(self) -> str:
        return (
            f"{len(self.logprobs)} loss tokens, log-probs differ by at most {self.logprobs.max():.2e}, "
            f"in the mean by {self.logprobs.mean():.2e}; {self.routes.mean():.4%} of {self.routes.size} "
            "routes differ"
        )


def compare(rows: list[Row], fresh: list[Fresh]) -> Differences:
    """Row by row."""
    logprobs, routes = [], []
    for row, pass_ in zip(rows, fresh, strict=True):
        assert row.routed_experts is not None and row.routed_mask is not None
        assert row.routed_mask.all()
        assert row.routed_experts.shape == pass_.routed.shape
        logprobs.append(np.abs(row.logprobs - pass_.logprobs)[row.loss_mask])
        routes.append((np.sort(row.routed_experts, -1) != np.sort(pass_.routed, -1)).any(-1))
    return Differences(np.concatenate(logprobs), np.concatenate(routes))


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """What vLLM reads."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest_asyncio.fixture(loop_scope="module", params=["float32", "bfloat16"], scope="module")
async def engine(request: Any, policy: Path, environment: None) -> AsyncIterator[Any]:
    """A real vLLM in one precision."""
    from legorl.engine.vllm import VllmEngine

    engine = VllmEngine.start(
        policy,
        dtype=request.param,
        max_model_len=CONTEXT,
        max_num_seqs=8,
        kv_cache_gb=0.5,
        timeout_s=120,
        routed=True,
    )
    yield engine
    await engine.close()


async def test_the_record_is_what_the_engine_says_again(engine: Any, policy: Path) -> None:
    import torch
    from prometheus_client import REGISTRY
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    dtype = str(engine.llm.model_config.dtype).removeprefix("torch.")
    rows = await record(engine, policy, dtype)
    hits = [
        s.value for m in REGISTRY.collect() for s in m.samples if s.name == "vllm:prefix_cache_hits_total"
    ]
    assert sum(hits) > 0, "no request found a cached prefix: the trial is too short to show anything"
    again = [await forced_by_vllm(engine, row, f"again{index}") for index, row in enumerate(rows)]
    by_vllm = compare(rows, again)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    by_transformers = compare(rows, [forced_by_transformers(model, row) for row in rows])
    print(f"\n{dtype}: vLLM again: {by_vllm}\n{dtype}: transformers in fp32: {by_transformers}")
    if dtype == "float32":
        assert by_vllm.logprobs.max() <= TOLERANCE
        assert by_transformers.logprobs.max() <= TOLERANCE
        assert not by_vllm.routes.any() and not by_transformers.routes.any()
        for row, pass_ in zip(rows, again, strict=True):
            assert np.array_equal(row.routed_experts, pass_.routed)  # in their order too
    else:
        assert by_vllm.logprobs.mean() < 0.05
        assert by_vllm.routes.mean() < 0.05

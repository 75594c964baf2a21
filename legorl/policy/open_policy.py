"""Opens the policy of a single trial: the scripted expert, a model in this process, or a server of one.

Invariant: the engine is closed when the block ends, on every path.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from legorl.config.schema import Config
from legorl.engine.base import ReplyParser, TokenEngine
from legorl.errors import UserError
from legorl.tasks.task import Task


@dataclass(frozen=True)
class Policy:
    """An engine, and what is needed to talk to it."""

    engine: TokenEngine
    model_dir: Path
    """Hugging Face directory with the tokenizer and the chat template."""
    parser: ReplyParser


@contextlib.asynccontextmanager
async def expert(config: Config, task: Task, directory: Path) -> AsyncIterator[Policy]:
    """The scripted expert of the pool `repair`, with a tokenizer that is made in `directory`."""
    from tokenizers import Tokenizer  # type: ignore[import-untyped]

    from legorl.engine.scripted import ScriptedEngine
    from legorl.policy.expert import Expert, Mode
    from legorl.policy.tokenizer import corpus, save_tokenizer, train_tokenizer
    from legorl.policy.written import WrittenCalls

    def write_tokenizer() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        made = train_tokenizer(corpus([task.instruction]), config.model.vocabulary)
        save_tokenizer(made, directory, config.engine.max_model_len)

    await asyncio.to_thread(write_tokenizer)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    engine = ScriptedEngine(Expert(Mode.PERFECT), tokenizer, config.seed)
    try:
        yield Policy(engine, directory, WrittenCalls())
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def model(config: Config, directory: Path) -> AsyncIterator[Policy]:
    """The model of a directory, in vLLM in this process. Raises `UserError`, `EngineError`."""
    from legorl.engine.vllm_parser import vllm_parser

    parser = vllm_parser(config.model, _model_dir(directory))
    from legorl.engine.vllm import VllmEngine

    settings = config.engine
    engine = VllmEngine.start(
        directory,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_gb=settings.kv_cache_gb,
        timeout_s=settings.request_timeout_s,
    )
    try:
        yield Policy(engine, directory, parser)
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def server(config: Config, url: str, directory: Path) -> AsyncIterator[Policy]:
    """A vLLM server over HTTP; `directory` has its model's tokenizer. Raises `UserError`, `EngineError`."""
    from legorl.engine.vllm_http import VllmHttpEngine
    from legorl.engine.vllm_parser import vllm_parser

    parser = await asyncio.to_thread(vllm_parser, config.model, _model_dir(directory))
    engine = await VllmHttpEngine.open(url, timeout_s=config.engine.request_timeout_s)
    try:
        yield Policy(engine, directory, parser)
    finally:
        await engine.close()


def _model_dir(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} is no model: a Hugging Face directory with config.json is needed.")
    return directory

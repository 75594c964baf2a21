"""Everything a trial needs, put together from a configuration, and one trial run with it.

Invariant: what `open_workshop` opens, its exit closes, in reverse order, on every path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from legorl.config.schema import Config
from legorl.engine.base import ReplyParser, TokenEngine
from legorl.harness.base import Harness
from legorl.harness.registry import get_harness
from legorl.proxy.proxy import Proxy
from legorl.proxy.render import Renderer
from legorl.sandbox.base import SandboxProvider
from legorl.sandbox.providers import open_provider, run_name
from legorl.tasks.task import Task
from legorl.trial.phases import Watcher
from legorl.trial.runner import TrialRequest, TrialResult, TrialRunner


@dataclasses.dataclass(frozen=True)
class Workshop:
    """What the trials of one process share."""

    runner: TrialRunner
    provider: SandboxProvider
    proxy: Proxy
    harness: Harness


@asynccontextmanager
async def open_workshop(
    config: Config, engine: TokenEngine, model_dir: Path, parser: ReplyParser, run_dir: Path
) -> AsyncIterator[Workshop]:
    """Open provider, proxy and harness in the running event loop.

    Args:
        engine: stays the caller's to close.
        model_dir: Hugging Face directory with tokenizer and chat template.
        run_dir: trials are recorded below its `trials/`.

    Raises:
        UserError: something is missing on the machine or not installed.
    """
    harness = get_harness(config.harness)
    proxy = Proxy(
        engine,
        Renderer.load(model_dir),
        parser,
        context_tokens=config.engine.max_model_len,
        observed=config.proxy.echo == "observed",
    )
    provider = open_provider(config.sandbox, run_name(run_dir))
    try:
        runner = TrialRunner(provider, proxy, harness, config, run_dir)
    except BaseException:
        await provider.close()
        await harness.close()
        raise
    try:
        yield Workshop(runner, provider, proxy, harness)
    finally:
        await runner.close()
        await proxy.aclose()
        await harness.close()


async def run_one(
    workshop: Workshop, task: Task, *, trial_id: str = "one", watcher: Watcher | None = None
) -> TrialResult:
    """One trial outside any training, recorded as step 0."""
    request = TrialRequest(task, trial_id, group=trial_id, step=0, split=task.split)
    return await workshop.runner.run(request, watcher)

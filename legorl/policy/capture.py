"""Transcripts of the scripted expert, captured through the real harness, proxy and sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer  # type: ignore[import-untyped]

from legorl.config.schema import Config
from legorl.engine.base import ReplyParser
from legorl.engine.scripted import ScriptedEngine
from legorl.policy.expert import Expert, Mode
from legorl.policy.warm_start import Transcript
from legorl.tasks.task import Task
from legorl.trial.capture import capture
from legorl.trial.one import open_workshop


@dataclass(frozen=True)
class HarnessCapture:
    """A `legorl.policy.build.Capture`: real trials of the configured harness with the expert as engine."""

    config: Config
    tasks: Sequence[Task]
    """Train tasks; episodes go round them."""
    run_dir: Path
    """Trials are recorded below its `trials/`."""
    parser: Callable[[Path], ReplyParser]
    """From the model directory to the parser of its replies."""

    def __call__(
        self, model_dir: Path, mode: Mode, episodes: int, progress: Callable[[int, int], None]
    ) -> list[Transcript]:
        """See `legorl.policy.build.Capture.__call__`. Runs its own event loop."""
        return asyncio.run(self._capture(model_dir, mode, episodes, progress))

    async def _capture(
        self, model_dir: Path, mode: Mode, episodes: int, progress: Callable[[int, int], None]
    ) -> list[Transcript]:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        seed = self.config.model.warm_start.seed
        engine = ScriptedEngine(Expert(mode), tokenizer, seed)
        try:
            async with open_workshop(
                self.config, engine, model_dir, self.parser(model_dir), self.run_dir
            ) as workshop:
                captured = await capture(
                    self.tasks, episodes, workshop.runner, label=mode.value, progress=progress
                )
        finally:
            await engine.close()
        return [Transcript(row.token_ids, row.loss_mask, mode) for _, rows in captured for row in rows]

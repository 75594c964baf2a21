"""Building and pulling images with a Docker engine.

Invariant: the first image that cannot be had ends the rest; its error names who wants it and the step.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from legorl.config.schema_providers import DockerConfig
from legorl.errors import ImageError, UserError
from legorl.sandbox.docker_engine import Engine, EngineFailedError, check_address

_STEP = re.compile(r"^step \d+(/\d+)? ?: (.*)", re.IGNORECASE)
_WORDS = 20


@dataclass(frozen=True)
class Wanted:
    """An image to have."""

    image: str
    about: str
    """Who wants it and where that is written, for messages."""
    context: Callable[[], bytes] | None = None
    """Makes the tar to build it from; None: it is pulled."""
    timeout_s: float = 1800.0


async def provide(
    config: DockerConfig, wanted: Iterable[Wanted], jobs: int, progress: Callable[[int, int], None]
) -> int:
    """Have images, `jobs` at a time; returns how many were not there already.

    Raises:
        UserError: one cannot be had.
    """
    check_address(config)
    images = {item.image: item for item in wanted}
    slots = asyncio.Semaphore(jobs)
    made = done = 0

    async def one(item: Wanted) -> None:
        nonlocal made, done
        async with slots:
            try:
                if item.context is None:
                    made += await pull(engine, item.image, item.timeout_s)
                else:
                    context = await asyncio.to_thread(item.context)
                    made += await build(engine, context, item.image, item.timeout_s)
            except ImageError as error:
                raise UserError(f"{item.about}: {error}.") from error
        done += 1
        progress(done, len(images))

    engine = Engine(config)
    try:
        async with asyncio.TaskGroup() as group:
            for item in images.values():
                group.create_task(one(item))
    except* UserError as errors:
        raise errors.exceptions[0] from None
    finally:
        await engine.close()
    return made


async def build(engine: Engine, context: bytes, tag: str, timeout_s: float) -> bool:
    """Build the Dockerfile of a context; False when there is an image of that name already.

    Raises:
        ImageError: a step failed, or took too long; the message names it and has its last words.
    """
    step = "reading the Dockerfile"
    said: deque[str] = deque(maxlen=_WORDS)
    try:
        if await engine.image_exists(tag):
            return False
        async with asyncio.timeout(timeout_s):
            async for line in engine.build(io.BytesIO(context), tag):
                for text in str(line.get("stream", "")).splitlines():
                    if begun := _STEP.match(text):
                        step = f"step `{begun[2].strip()}`"
                        said.clear()
                    elif text.strip():
                        said.append(text.rstrip())
    except TimeoutError:
        raise ImageError(f"{step} was not finished after {timeout_s:g} s") from None
    except EngineFailedError as error:
        raise ImageError(f"{step} failed: {error}".rstrip(".") + _quoted(said)) from error
    return True


def _quoted(lines: deque[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


async def pull(engine: Engine, image: str, timeout_s: float) -> bool:
    """Pull an image; False when it is there already.

    Raises:
        ImageError: there is none, or its registry cannot be reached.
    """
    try:
        if await engine.image_exists(image):
            return False
        async with asyncio.timeout(timeout_s):
            await _exhaust(engine.pull(image))
    except TimeoutError:
        raise ImageError(f"{image} was not pulled within {timeout_s:g} s") from None
    except EngineFailedError as error:
        raise ImageError(f"{image} cannot be pulled: {error}") from error
    return True


async def _exhaust(lines: AsyncIterator[dict[str, Any]]) -> None:
    async for _ in lines:
        pass

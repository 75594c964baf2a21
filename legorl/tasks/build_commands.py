"""`legorl tasks build`: the images that tasks need, made before any trial needs them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence

from legorl.config.compose import compose
from legorl.errors import UserError
from legorl.tasks.image import built_image, context_tar
from legorl.tasks.task import Task


def add_build(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command."""
    images = commands.add_parser(
        "build", help="build Dockerfiles of tasks, and pull images they name, with a Docker engine"
    )
    images.add_argument(
        "targets",
        nargs="+",
        metavar="POOL|TASK|KEY=VALUE",
        help="names or paths, and settings such as sandbox.docker.host=unix:///run/docker.sock",
    )
    return images


def settings_and_names(targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of the command's arguments."""
    return [word for word in targets if "=" in word], [word for word in targets if "=" not in word]


def build_images(
    tasks: Sequence[Task], settings: Sequence[str], jobs: int, progress: Callable[[int, int], None]
) -> str:
    """Have the images of tasks; what was done.

    Raises:
        UserError: an image cannot be had, or the client library is missing.
    """
    try:
        from legorl.sandbox.docker_images import Wanted, provide
    except ImportError as error:
        raise UserError(f"`legorl tasks build` needs `pip install 'legorl[docker]'` ({error}).") from error

    def wanted_by(task: Task) -> Wanted | None:
        if task.image:
            return Wanted(task.image, f"Task {task.id}: docker_image in {task.path / 'task.toml'}")
        if task.dockerfile is None:
            return None
        about = f"Task {task.id}: {task.dockerfile}"
        return Wanted(built_image(task), about, lambda: context_tar(task), task.build_timeout_s)

    wanted = [item for task in tasks if (item := wanted_by(task)) is not None]
    config = compose(["sandbox=docker", *settings]).sandbox.docker
    made = asyncio.run(provide(config, wanted, jobs, progress))
    count = len({item.image for item in wanted})
    return f"{len(tasks)} tasks, {count} images: {made} made now, {count - made} there already."

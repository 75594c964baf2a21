"""The part of a Dockerfile that can be followed without building an image: COPY, WORKDIR and ENV."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Copy:
    """A directory of the context, whose contents go into `target`, or a file, which goes to it."""

    source: Path
    target: str

    @property
    def directory(self) -> str:
        """What must be there before."""
        return self.target if self.source.is_dir() else str(PurePosixPath(self.target).parent)


@dataclass
class Recipe:
    """What a Dockerfile asks for."""

    workdir: str = ""
    copies: list[Copy] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


def read_dockerfile(file: Path) -> Recipe:
    """Read one whose only other instruction is FROM.

    Raises:
        ValueError: it asks for more than copying; the message names the line.
    """
    recipe = Recipe()
    text = re.sub(r"\\\n", " ", file.read_text())
    for number, line in enumerate(text.splitlines(), 1):
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#") or word.upper() in ("FROM", "LABEL", "CMD"):
            continue
        try:
            if not _follow(recipe, word.upper(), shlex.split(rest), file.parent):
                raise ValueError(
                    "only FROM, COPY, WORKDIR, ENV, LABEL and CMD can be followed without building"
                )
        except ValueError as error:
            raise ValueError(
                f"{file}, line {number}, `{line.strip()}`: {error}. Build the image and name it as "
                "[environment] docker_image in task.toml."
            ) from error
    return recipe


def _follow(recipe: Recipe, instruction: str, words: list[str], context: Path) -> bool:
    if instruction == "WORKDIR":
        recipe.workdir = str(PurePosixPath(recipe.workdir or "/", *words))
    elif instruction == "ENV" and all("=" in word for word in words):
        recipe.env |= dict(word.split("=", 1) for word in words)
    elif instruction == "COPY" and len(words) >= 2 and not words[0].startswith("--"):
        *sources, target = words
        for name in sources:
            source = (context / name).resolve()
            if not source.is_relative_to(context.resolve()) or not source.exists():
                raise ValueError(f"{name} is not in {context}")
            place = PurePosixPath(recipe.workdir or "/", target)
            into = source.is_file() and (target.endswith("/") or target == "." or len(sources) > 1)
            recipe.copies.append(Copy(source, str(place / source.name if into else place)))
    else:
        return False
    return True

"""From command-line overrides to a typed, resolved `Config`.

Invariant: a mistake in an override or a file ends in one `UserError` that names the key or the choice,
never in a traceback of Hydra's.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from legorl.config import rules, store
from legorl.config.keys import groups, is_choice, packaged_dir, packaged_groups, schema_keys, suggest
from legorl.config.schema import Config
from legorl.errors import UserError


@dataclass(frozen=True)
class Composed:
    """A checked configuration, and how it was asked for."""

    config: Config
    choices: dict[str, str]
    """Group -> choice."""
    overrides: tuple[str, ...]


def compose(overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> Config:
    """The typed tree for these overrides, checked against the rules. Raises `UserError`."""
    return compose_run(overrides, config_dirs).config


def compose_run(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> Composed:
    """As `compose`, with the choice of each group. `config_dirs` hold the user's own group files."""
    store.register()
    directories = [packaged_dir(), *(_user_dir(path) for path in config_dirs)]
    known = groups(directories)
    for override in _parse(overrides):
        if override.is_sweep_override():
            raise UserError(
                f"{override.input_line} names several values: add -m to run them one after another."
            )
        _check_override(override, known)
    paths = [_quoted(f"file://{path}") for path in directories[1:]]
    search = [f"hydra.searchpath=[{','.join(paths)}]"] if paths else []
    try:
        with initialize_config_dir(str(directories[0]), version_base="1.3", job_name="legorl"):
            tree = _hydra([*overrides, *search])
        choices = {group: str(tree.hydra.runtime.choices[group]) for group in known}
        with_hydra = cast(dict[str, object], OmegaConf.to_container(tree, resolve=False))
        with_hydra.pop("hydra")
        # Merged once more into the closed schema: whatever a file or Hydra let in ends here.
        config = to_config(OmegaConf.create(with_hydra))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error)) from error
    rules.check(config)
    return Composed(config, choices, tuple(overrides))


def _hydra(overrides: list[str]) -> DictConfig:
    try:
        return hydra_compose("config", overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException):
        raise
    except Exception as error:  # a file of the user's can trip Hydra anywhere: a defaults list of one number
        raise UserError(
            f"The configuration cannot be composed ({type(error).__name__}): {' '.join(str(error).split())}"
        ) from error


def _quoted(text: str) -> str:
    """As a string of Hydra's override grammar, where a backslash counts before a quote only."""
    escaped = re.sub(r'(\\+)(?="|$)', r"\1\1", text).replace('"', '\\"')
    return f'"{escaped}"'


def to_config(tree: DictConfig) -> Config:
    """A plain tree as a typed one, with interpolations resolved (secrets stay references).

    Raises:
        UserError: an unknown, missing or wrongly typed key.
    """
    store.register()
    try:
        typed = OmegaConf.merge(OmegaConf.structured(Config), tree)
        if missing := sorted(OmegaConf.missing_keys(typed)):
            raise UserError(f"The configuration has no value for {', '.join(missing)}.")
        return cast(Config, OmegaConf.to_object(typed))
    except OmegaConfBaseException as error:
        raise UserError(_explain(error)) from error


MOST_JOBS = 1000
"""Of one sweep; more is a slip of the keyboard."""


def expand_sweep(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> list[list[str]]:
    """Every combination of `a,b`, `range(…)`, `choice(…)` and, for a group, `glob(…)`, in the order written.

    Raises:
        UserError: not a sweep, one without values, or one of too many jobs.
    """
    choices = groups([packaged_dir(), *config_dirs])
    axes = [_values(override, choices) for override in _parse(overrides)]
    count = math.prod(len(axis) for axis in axes)
    if count > MOST_JOBS:
        raise UserError(f"This sweep has more than {MOST_JOBS} jobs. Split it.")
    return [list(combination) for combination in itertools.product(*axes)]


def _values(override: Override, choices: dict[str, list[str]]) -> list[str]:
    """One axis of a sweep: the overrides that this one stands for; at most one too many."""
    text = str(override.input_line)
    if not override.is_sweep_override():
        return [text]
    key = override.get_key_element()
    value = override.value()
    if isinstance(value, Glob):
        if override.key_or_group not in choices:
            raise UserError(f"{text}: glob(…) chooses among the files of a group; name the values instead.")
        values = value.filter(choices[override.key_or_group])
    else:
        try:
            values = list(itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1))
        except (HydraException, ValueError) as error:
            raise UserError(f"{text} cannot be swept over: {error}.") from error
    if not values:
        raise UserError(f"{text} has no values, so there is nothing to run.")
    return [f"{key}={value}" for value in values]


def _parse(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            raise UserError(
                f"{text!r} is not an override. Write group=choice or group.key=value, "
                "and quote a value with special characters: 'run.name=\"a=b\"'."
            ) from error
    return parsed


def _user_dir(path: Path) -> Path:
    """Group files, none with a packaged name: of two files with one name Hydra takes one, silently."""
    if not path.is_dir():
        raise UserError(f"--config-dir {path} is not a directory.")
    files = [path / "config.yaml"] if (path / "config.yaml").exists() else []
    for group in packaged_groups():
        files += sorted(file for file in path.glob(f"{group}/**/*.yaml") if is_choice(file, path))
    if not files:
        raise UserError(
            f"--config-dir {path} has no choice of any group. A file GROUP/CHOICE.yaml in it would be one; "
            f"groups: {', '.join(packaged_groups())}."
        )
    for file in files:
        if (packaged_dir() / file.relative_to(path)).exists():
            raise UserError(
                f"{file} has the name of a packaged configuration. Give your own file another name."
            )
        _check_file(file)
    return path.resolve()


def _check_file(file: Path) -> None:
    try:
        tree = OmegaConf.load(file)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, DictConfig):
        raise UserError(f"{file} holds no keys with values (`key: value`).")


def _check_override(override: Override, known: dict[str, list[str]]) -> None:
    key = override.key_or_group
    if key not in known and key not in schema_keys():
        raise UserError(f"There is no configuration key {key!r}.{suggest(key, [*schema_keys(), *known])}")
    if override.type is OverrideType.DEL:
        raise UserError(
            f"{override.input_line}: nothing can be removed from the tree; choose another value instead."
        )
    if override.type is not OverrideType.CHANGE:
        raise UserError(f"{override.input_line}: {key} exists, so it is set without a plus: {key}=…")
    if key in known and (choice := override.value()) not in known[key]:
        raise UserError(
            f"There is no {key} called {choice!r}.{suggest(str(choice), known[key])} "
            f"Choices: {', '.join(known[key])}."
        )


def _explain(error: BaseException) -> str:
    """One sentence from the error that OmegaConf or Hydra raised, naming the key and what belongs there."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OmegaConfBaseException) and cause.full_key):
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, OmegaConfBaseException):
        return f"The configuration cannot be composed: {' '.join(str(error).split())}"
    key = re.sub(r"\[\d+\]$", "", str(cause.full_key))
    kind = schema_keys().get(key)
    if kind is None:
        return f"There is no configuration key {key!r}.{suggest(key, schema_keys())}"
    first_line = str(cause.msg or cause).splitlines()[0].rstrip(".")
    return f"{key} takes {getattr(kind, '__name__', kind)}: {first_line}."

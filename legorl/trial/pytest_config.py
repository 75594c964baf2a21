"""Files that configure a test runner beside much else: `pyproject.toml` and `setup.cfg`.

An agent may change its project's dependencies; it may not change how the tests are run. Invariant: what a
test runner reads from the result is what it reads from the pristine file, or the file is the pristine one.
"""

from __future__ import annotations

import configparser
import re
import tomllib
from collections.abc import Mapping
from typing import Any

SHARED_FILES = ("pyproject.toml", "setup.cfg")
_TOML_TABLES = ("pytest", "tox", "coverage", "nose", "nose2", "unittest")
_INI_SECTIONS = re.compile(
    r"(?:tool:)?pytest|tool:tox.*|tox.*|testenv.*|nosetests|aliases|unittest|coverage:.*|test"
)
_HEADER = re.compile(r"(?m)^[ \t]*(?=\[)")
_NAME = re.compile(r"\[+\s*([^\]]*?)\s*\]")


def with_pristine_tests(name: str, new: bytes, old: bytes) -> bytes | None:
    """The agent's file with the test runner's sections of the pristine one.

    Args:
        name: `pyproject.toml` or `setup.cfg`.
        new: the agent's contents.
        old: the pristine contents; empty where there was no such file.

    Returns:
        None when the pristine file has to be taken as it is.
    """
    read = _toml if name.endswith(".toml") else _ini
    try:
        wanted, got = read(old.decode()), read(new.decode())
        if got == wanted:
            return new
        mended = _replace(new.decode(), old.decode(), name)
        return mended.encode() if read(mended) == wanted else None
    except (ValueError, configparser.Error, RecursionError):
        return None


def _toml(text: str) -> Mapping[str, Any]:
    tool = tomllib.loads(text).get("tool", {})
    return {name: tool[name] for name in _TOML_TABLES if name in tool}


def _ini(text: str) -> Mapping[str, Any]:
    parser = configparser.RawConfigParser(strict=False, default_section="\0")
    parser.read_string(text)
    return {name: dict(parser[name]) for name in parser.sections() if _INI_SECTIONS.fullmatch(name)}


def _replace(new: str, old: str, name: str) -> str:
    kept = [section for section in _sections(new) if not _for_tests(section, name)]
    own = [section for section in _sections(old) if _for_tests(section, name)]
    return "".join(
        section if section.endswith("\n") else section + "\n" for section in (*kept, *own) if section
    )


def _sections(text: str) -> list[str]:
    """Pieces that begin with a header each, but for the first."""
    starts = [match.start() for match in _HEADER.finditer(text)]
    return [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]


def _for_tests(section: str, name: str) -> bool:
    header = _NAME.match(section.lstrip())
    if header is None:
        return False
    if name.endswith(".toml"):
        parts = header.group(1).replace(" ", "").split(".")
        return parts[0] == "tool" and len(parts) > 1 and parts[1].strip("\"'") in _TOML_TABLES
    return _INI_SECTIONS.fullmatch(header.group(1)) is not None

"""A request's body: JSON in, Python objects out, at the cost of what is new in it.

A harness sends its whole history with every request. Elements of the body's lists (messages, tools, system
blocks) that came before are known by their bytes and not decoded again; the wires keep what they read from
one with it. Invariants: the result equals that of decoding everything anew; nobody changes a decoded value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec

from legorl.proxy.messages import Json
from legorl.proxy.refusal import invalid

T = TypeVar("T")

_REMEMBERED_BYTES = 8 << 20
"""Of one trial; a history of a million tokens is about half of it."""

_FIELDS = msgspec.json.Decoder(
    dict[str, list[msgspec.Raw] | dict[str, Json] | str | int | float | bool | None]
)
"""Values as JSON has them, but for the elements of lists, which stay bytes."""
_ELEMENT = msgspec.json.Decoder()
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape sequence, a pair of surrogates counted as one; group 1 is a surrogate without its other half."""


class Element(dict[str, Json]):
    """An object in one of the body's lists, and what was read from it."""

    __slots__ = ("_reader", "_reading")

    def __init__(self, value: dict[str, Json]) -> None:
        super().__init__(value)
        self._reader: object = None

    def read_with(self, read: Callable[[Json], T]) -> T:
        """`read(self)`, remembered. `read` depends on its argument alone."""
        if self._reader is not read:
            self._reading = read(self)
            self._reader = read
        return self._reading


class BodyReader:
    """Reads the bodies of one trial."""

    def __init__(self) -> None:
        self._known: dict[bytes, Json] = {}
        self._bytes = 0

    def read(self, raw: bytes) -> dict[str, Json]:
        """Decode a body. An escaped surrogate without its other half, which no encoding has, is U+FFFD.

        Raises:
            Refusal: it is not a JSON object in UTF-8.
        """
        try:
            try:
                return self._read(raw)
            except msgspec.DecodeError:
                mended = _mend(raw)
                if mended == raw:
                    raise
                return self._read(mended)
        except msgspec.DecodeError as error:
            raise invalid(f"the body is not a valid JSON object: {error}") from None
        except RecursionError:
            raise invalid("the body is nested too deeply") from None

    def _read(self, raw: bytes) -> dict[str, Json]:
        return {
            name: [self._element(bytes(element)) for element in value] if isinstance(value, list) else value
            for name, value in _FIELDS.decode(raw).items()
        }

    def _element(self, raw: bytes) -> Json:
        known = self._known.get(raw)
        if known is None:
            known = _ELEMENT.decode(raw)
            if isinstance(known, dict):
                known = Element(known)
                self._remember(raw, known)
        return known

    def _remember(self, raw: bytes, element: Element) -> None:
        if self._bytes + len(raw) > _REMEMBERED_BYTES:
            self._known.clear()
            self._bytes = 0
        self._known[raw] = element
        self._bytes += len(raw)


def _mend(raw: bytes) -> bytes:
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return raw
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match[1] else match[0], raw)

"""Bodies are decoded as the standard library would, and what came before is not decoded again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legorl.proxy.body import _REMEMBERED_BYTES, BodyReader, Element
from legorl.proxy.refusal import Reason, Refusal
from legorl.proxy.wire import read_each

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(TEXTS, VALUES, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(BODIES, min_size=1, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_equals_the_standard_library(bodies: list[object], ascii_only: bool, indent: int | None) -> None:
    reader = BodyReader()
    for body in [*bodies, *bodies]:
        text = json.dumps(body, ensure_ascii=ascii_only, indent=indent)
        assert reader.read(text.encode()) == json.loads(text)


def test_an_element_that_came_before_is_the_same_object_and_is_read_once() -> None:
    reader, reads = BodyReader(), []

    def read(value: object) -> object:
        reads.append(value)
        return object()

    first = reader.read(b'{"messages":[{"role":"user","content":"a"}]}')["messages"]
    second = reader.read(b'{"messages": [{"role":"user","content":"a"}, {"role":"user","content":"b"}]}')[
        "messages"
    ]
    assert isinstance(first[0], Element)
    assert second[0] is first[0]
    assert read_each(first, "messages", read)[0] is read_each(second, "messages", read)[0]
    assert reads == [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


def test_a_refused_element_is_refused_again() -> None:
    element = Element({"role": 1})

    def read(value: object) -> object:
        raise Refusal(Reason.INVALID, "role")

    for _ in range(2):
        with pytest.raises(Refusal, match=r"messages\[0\].role"):
            read_each([element], "messages", read)


def test_memory_is_bounded() -> None:
    reader = BodyReader()
    for index in range(15):
        reader.read(
            json.dumps({"messages": [{"content": str(index % 10) * (_REMEMBERED_BYTES // 10)}]}).encode()
        )
    assert sum(map(len, reader._known)) <= _REMEMBERED_BYTES


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (rb'"a\ud83d"', "a\ufffd"),
        (rb'"\uDE00b"', "\ufffdb"),
        (rb'"\ud83d\ude00 \ud83d"', "\U0001f600 \ufffd"),
        (rb'"\ud83d\ud83d\ude00"', "\ufffd\U0001f600"),
        (rb'"\\ud83d \ud83d"', "\\ud83d \ufffd"),
        (rb'"\\\ud83d"', "\\\ufffd"),
        (rb'"\u00e9\n\ud800\n"', "é\n\ufffd\n"),
    ],
)
def test_half_a_pair_of_surrogates_is_replaced(raw: bytes, text: str) -> None:
    assert BodyReader().read(b'{"a": [{"b": ' + raw + b"}]}") == {"a": [{"b": text}]}
    assert BodyReader().read(b"{" + raw + b":1}") == {text: 1}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[1]",
        b'"text"',
        b"null",
        b"{",
        b'{"a":1}x',
        b'{"a":[1,2,}',
        b'{"messages":[{"a":tru}]}',
        b'{"a":NaN}',
        b'{"a":[Infinity]}',
        b'{"a":"\xff"}',
        b'{"messages":[{"a":"\xc3\x28"}]}',
        b'{"\xff":1}',
        b'{"a":"\x01"}',
        b'{"a":"\\x"}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
        b'{"a":[9e999]}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
    ids=lambda raw: repr(raw[:16]),
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    reader = BodyReader()
    reader.read(b'{"messages":[{"a":1}]}')
    with pytest.raises(Refusal) as refusal:
        reader.read(raw)
    assert refusal.value.reason is Reason.INVALID
    assert refusal.value.message.startswith("the body is")
    assert reader.read(b'{"messages":[{"a":1}]}') == {"messages": [{"a": 1}]}

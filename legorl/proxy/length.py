"""Whether a request is too long for any context, found out before it is rendered.

Everything that is tokenised holds up all trials of the process, and a body may be thousands of times as long
as a context. Invariant: what is tokenised here is never much more than fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized

from legorl.proxy.messages import ChatRequest

_SUSPICIOUS = 8
"""Characters per token; code and prose have three to five."""
_PIECE = 1 << 16


def exceeds(request: ChatRequest, tokens: int, encode: Callable[[str], Sized]) -> bool:
    """Whether the texts of a request are surely more than `tokens` tokens."""
    if sum(map(len, _texts(request))) <= _SUSPICIOUS * tokens:
        return False
    count = 0
    for text in _texts(request):
        for start in range(0, len(text), _PIECE):
            count += len(encode(text[start : start + _PIECE])) - 1  # a cut can part one token in two
            if count > tokens:
                return True
    return False


def _texts(request: ChatRequest) -> Iterator[str]:
    if request.tools:
        yield request.tools_key
    for message in request.messages:
        yield message.text
        for call in message.calls:
            yield call.arguments

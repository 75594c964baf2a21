"""A transcript on disk: `segments.npz` (all arrays) and `messages.jsonl.zst` (everything else).

Invariants: each file is written under a partial name and renamed; `messages.jsonl.zst` comes last, ends with
a count of its lines and the hash of the arrays, and carries a checksum: a directory either holds a whole
transcript, byte for byte as it was written, or says that it does not. Each message is written once, however
often the harness sent it.
"""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import zstandard
from numpy.typing import NDArray

from legorl.engine.base import Finish
from legorl.errors import UserError
from legorl.harness.base import ThreadKind
from legorl.proxy.align import Node
from legorl.proxy.arrays import Blocks
from legorl.proxy.echoes import Turn
from legorl.proxy.messages import Json, Tool, message_from_json, message_to_json
from legorl.proxy.segment import Segment
from legorl.proxy.transcript import Orphan, Thread, Transcript

ARRAYS = "segments.npz"
MESSAGES = "messages.jsonl.zst"
VERSION = 2

Line = dict[str, Json]
_DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    MemoryError,
    RecursionError,
    BadZipFile,
    zlib.error,
    zstandard.ZstdError,
)
"""What reading a file that is not whole can raise."""


def save(transcript: Transcript, directory: Path) -> None:
    """Write both files into `directory`, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **_arrays(transcript))  # type: ignore[arg-type]
    (directory / MESSAGES).unlink(missing_ok=True)
    _write(directory / ARRAYS, buffer.getvalue())
    lines = [json.dumps(line, ensure_ascii=False) for line in _lines(transcript)]
    lines.append(json.dumps(_end(len(lines), buffer.getvalue())))
    text = "\n".join(lines).encode(errors="replace")
    _write(directory / MESSAGES, zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text))


def load(directory: Path) -> Transcript:
    """Read a transcript.

    Raises:
        UserError: it is not there, was never completed, or is damaged.
    """
    try:
        raw = (directory / MESSAGES).read_bytes()
        stored = (directory / ARRAYS).read_bytes()
        text = zstandard.ZstdDecompressor().decompressobj().decompress(raw).decode()
        lines = [json.loads(line) for line in text.split("\n")]
        end = _end(len(lines) - 1, stored)
        if lines[-1] != end:
            same_length = lines[-1].get("lines") == end["lines"]
            raise ValueError(f"{ARRAYS} has changed" if same_length else "the end is missing")
        with np.load(io.BytesIO(stored), allow_pickle=False) as members:
            arrays = dict(members)
        return _read(lines, arrays)
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise UserError(
            f"{directory} has no {name}: the trial was interrupted, or this is no trial."
        ) from error
    except _DAMAGE as error:
        raise UserError(
            f"The transcript in {directory} cannot be read ({error}). It is damaged, or from another version."
        ) from error


def _end(lines: int, arrays: bytes) -> Line:
    return {"kind": "end", "lines": lines, "arrays": hashlib.blake2b(arrays, digest_size=16).hexdigest()}


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.rename(path)


def _arrays(transcript: Transcript) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for segment in transcript.segments:
        key = f"segment{segment.id}."
        arrays[key + "token_ids"] = segment.tokens.view
        arrays[key + "loss_mask"] = segment.mask.view
        arrays[key + "logprobs"] = segment.logprobs.view
        arrays[key + "weight_version"] = segment.versions.view
        if segment.routing is not None:
            arrays[key + "routed_experts"] = segment.routing.joined()
            arrays[key + "routed_mask"] = segment.routed.view
    for index, orphan in enumerate(transcript.orphans):
        key = f"orphan{index}."
        arrays[key + "token_ids"] = orphan.turn.token_ids
        arrays[key + "logprobs"] = orphan.logprobs
        arrays[key + "weight_version"] = orphan.versions
    return arrays


def _lines(transcript: Transcript) -> Iterator[Line]:
    yield {
        "kind": "header",
        "version": VERSION,
        "trial": transcript.trial,
        "model_dir": transcript.model_dir,
        "wishes": transcript.wishes,
        "tools": [
            [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools]
            for tools in transcript.tools
        ],
    }
    for thread in transcript.threads.values():
        yield {
            "kind": "thread",
            "name": thread.name,
            "speaker": thread.kind.value,
            "parent": thread.parent,
            "label": thread.label,
        }
    for segment in transcript.segments:
        yield {
            "kind": "segment",
            "id": segment.id,
            "thread": segment.thread,
            "parent_thread": segment.parent_thread,
            "forked_from": segment.forked_from,
        }
    for turn in transcript.turns:
        yield {
            "kind": "turn",
            "id": turn.id,
            "segment": turn.segment.id,
            "start": turn.start,
            "end": turn.end,
            "finish": turn.finish.value,
            "message": message_to_json(turn.message),
            "aligned": turn.kind,
            "ended": turn.ended,
            "prompt_digest": turn.prompt_digest,
            "sample_digest": turn.sample_digest,
            "delivered": turn.delivered,
            "echoed": turn.echoed,
            "superseded": turn.superseded,
            "changed": turn.changed,
            "orphan": turn.orphan,
        }
    for orphan in transcript.orphans:
        yield {"kind": "orphan", "turn": orphan.turn.id}
    for node in transcript.nodes:
        yield {
            "kind": "message",
            "id": node.id,
            "parent": node.parent.id if node.parent else None,
            "message": message_to_json(node.message) if node.message else None,
            "tools": node.tools,
            "thread": node.thread,
            "turn": node.turn.id if node.turn else None,
            "segment": node.segment.id if node.segment else None,
            "end": node.end,
        }


def _read(lines: list[Line], arrays: dict[str, NDArray[Any]]) -> Transcript:
    by_kind: dict[str, list[Line]] = {}
    for line in lines:
        by_kind.setdefault(line["kind"], []).append(line)
    header = by_kind["header"][0]
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']}, this program reads {VERSION}")
    transcript = Transcript(header["trial"], header["model_dir"])
    transcript.wishes = header["wishes"]
    transcript.tools = [[Tool(**tool) for tool in tools] for tools in header["tools"]]
    for line in by_kind.get("thread", ()):
        kind = ThreadKind(line["speaker"])
        transcript.threads[line["name"]] = Thread(line["name"], kind, line["parent"], line["label"])
    segments = {line["id"]: _segment(line, arrays) for line in by_kind.get("segment", ())}
    transcript.segments = list(segments.values())
    orphaned = [line["turn"] for line in by_kind.get("orphan", ())]
    turns = {}
    for line in by_kind.get("turn", ()):
        segment = segments[line["segment"]]
        if line["orphan"]:
            token_ids = arrays[f"orphan{orphaned.index(line['id'])}.token_ids"]
        else:
            token_ids = segment.tokens.view[line["start"] : line["end"]]
        turns[line["id"]] = _turn(line, segment, token_ids)
    transcript.turns = list(turns.values())
    transcript.orphans = [
        Orphan(turns[turn], arrays[f"orphan{i}.logprobs"], arrays[f"orphan{i}.weight_version"])
        for i, turn in enumerate(orphaned)
    ]
    for line in by_kind.get("message", ()):
        transcript.nodes.append(
            Node(
                id=line["id"],
                parent=None if line["parent"] is None else transcript.nodes[line["parent"]],
                message=message_from_json(line["message"]) if line["message"] else None,
                tools=line["tools"],
                thread=line["thread"],
                turn=turns.get(line["turn"]),
                segment=segments.get(line["segment"]),
                end=line["end"],
            )
        )
    return transcript


def _segment(line: Line, arrays: dict[str, NDArray[Any]]) -> Segment:
    segment = Segment(line["id"], line["thread"], line["parent_thread"])
    if line["forked_from"] is not None:
        segment.forked_from = (line["forked_from"][0], line["forked_from"][1])
    key = f"segment{segment.id}."
    segment.tokens.append(arrays[key + "token_ids"])
    segment.mask.append(arrays[key + "loss_mask"])
    segment.logprobs.append(arrays[key + "logprobs"])
    segment.versions.append(arrays[key + "weight_version"])
    routing = arrays.get(key + "routed_experts")
    if routing is not None:
        segment.routing = Blocks(routing.dtype, routing.shape[1:])
        segment.routing.append(routing)
        segment.routed.append(arrays[key + "routed_mask"])
    return segment


def _turn(line: Line, segment: Segment, token_ids: NDArray[np.int32]) -> Turn:
    return Turn(
        id=line["id"],
        segment=segment,
        start=line["start"],
        end=line["end"],
        finish=Finish(line["finish"]),
        message=message_from_json(line["message"]),
        kind=line["aligned"],
        ended=line["ended"],
        token_ids=token_ids,
        prompt_digest=line["prompt_digest"],
        sample_digest=line["sample_digest"],
        delivered=line["delivered"],
        echoed=line["echoed"],
        superseded=line["superseded"],
        changed=tuple(line["changed"]),
        orphan=line["orphan"],
    )

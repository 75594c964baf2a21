"""What the proxy costs per call, as ratios within one run. See benchmarks/README.md.

    python -m benchmarks.proxy [--quick] [--json FILE] [--cache DIRECTORY]

Trials of 200 turns of about 1k tokens are played through the real application, from the bytes of each request
to the bytes of its answer, by the message shapes of three harnesses, one of each wire; the engine behind it
only looks things up. All times are processor times of this process. What is compared is
measured in turns, so that other work on the machine meets all of it; a figure is the lower quartile of the
calls near a history's length. The exit status is 1 when a ratio misses its bound; the short run of `--quick`
judges only what is counted, not what is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.smollm2 import fetch
from benchmarks.stage import EXPERTS_PER_TOKEN, LAYERS, Call, Rerendering, Stage
from benchmarks.traffic import CLAUDE_CODE, DIALECTS, Dialect, Step, make_steps
from legorl.proxy.render import Renderer
from legorl.proxy.session import Session


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    turns: int = 200
    short: int = 20_000
    long: int = 200_000
    """Histories that are compared, in tokens."""
    repetitions: int = 3
    trials: int = 64
    trial_turns: int = 50
    """Turns that each concurrent trial has had before it is measured."""
    trial_calls: int = 4
    """Of each concurrent trial."""


QUICK = Scale(turns=30, short=15_000, long=35_000, repetitions=1, trials=8, trial_turns=8, trial_calls=2)
_WINDOW = 6_000
"""Calls whose prompt is so near a length, in tokens, count for it."""


@dataclass(frozen=True)
class Ratio:
    """One result; `bound` is what it may be at most (or at least)."""

    harness: str
    what: str
    value: float
    bound: float
    detail: str
    at_least: bool = False
    timed: bool = True
    """Differs from run to run."""

    @property
    def holds(self) -> bool:
        """Whether the value keeps its bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass
class Lockstep:
    """What was measured in turns."""

    plain: list[Call] = field(default_factory=list)
    routed: list[Call] = field(default_factory=list)
    young: list[Call] = field(default_factory=list)
    rendering: list[float] = field(default_factory=list)
    """Processor seconds."""


class Bench:
    """The measurements of one harness."""

    def __init__(self, dialect: Dialect, model: Path, steps: Sequence[Step], scale: Scale) -> None:
        self._name, self._scale, self._steps = dialect.name, scale, steps
        # A prompt opens with up to 20k tokens of instructions; a turn is about 1k.
        routing = np.ones((20_000 + 1_200 * len(steps), LAYERS, EXPERTS_PER_TOKEN), np.uint8)
        self.plain = Stage(model, dialect, steps)
        self.routed = Stage(model, dialect, steps, routing=routing)
        self._bodies = self.plain.bodies()
        self._opened = 0

    def _open(self, stage: Stage) -> Session:
        self._opened += 1
        return stage.open(f"trial{self._opened}")

    def per_call(self) -> Iterator[Ratio]:
        """Cost against rendering, against a short history, and with routing; what is done per call."""
        times = Lockstep()
        for _ in range(self._scale.repetitions):
            asyncio.run(self._lockstep(times))
        short, long = self._cpu(times.young, self._scale.short), self._cpu(times.plain, self._scale.long)
        with_routing = self._cpu(times.routed, self._scale.long)
        full = _quartile(times.rendering)
        few, many = f"{self._scale.short // 1000}k", f"{self._scale.long // 1000}k"
        yield self._ratio(f"a call at {many} / rendering and tokenising {many}", long, full, 1 / 60, "ms")
        yield self._ratio(f"a call at {many} / a call at {few}", long, short, 2.5, "ms")
        yield self._ratio(f"with routing / without, at {many}", with_routing, long, 1.2, "ms")
        what = "{} / tokens new to the record, at most, after the first call"
        most = max(_later(times.plain), key=lambda call: call.encoded / call.new)
        yield self._ratio(what.format("tokens tokenised"), most.encoded, most.new, 1, "")
        most = max(_later(times.routed), key=lambda call: call.rows / call.new)
        yield self._ratio(what.format("routing rows asked for"), most.rows, most.new, 1, "")

    async def _lockstep(self, times: Lockstep) -> None:
        """A trial with routing, one without, and a young one, call by call, and now and then a rendering: the
        young one is at the short length when the others are at the long one."""
        gc.collect()
        rerendering, scale = Rerendering(self.plain), self._scale
        plain, routed, young = self._open(self.plain), self._open(self.routed), self._open(self.plain)
        childhood = iter(self._bodies)
        opening = 0
        for number, raw in enumerate(self._bodies):
            call = await self.plain.call(plain, raw)
            times.plain.append(call)
            times.routed.append(await self.routed.call(routed, raw))
            opening = opening or call.prompt
            if call.prompt >= scale.long - scale.short + opening:
                times.young.append(await self.plain.call(young, next(childhood)))
            if abs(call.prompt - scale.long) <= _WINDOW and number % 4 == 0:
                request = rerendering.read(raw)
                start = time.process_time()
                self.plain.renderer.render_full(request.messages, request.tools)
                times.rendering.append((time.process_time() - start) * scale.long / call.prompt)
        for session in (plain, young):
            self.plain.close(session)
        self.routed.close(routed)

    def _cpu(self, calls: Sequence[Call], tokens: int) -> float:
        return _quartile([call.cpu_s for call in calls if abs(call.prompt - tokens) <= _WINDOW])

    def _ratio(
        self, what: str, value: float, base: float, bound: float, unit: str, *, at_least: bool = False
    ) -> Ratio:
        factor, digits = (1e3, 2) if unit == "ms" else (1, 1 if unit else 0)
        detail = f"{value * factor:.{digits}f} / {base * factor:.{digits}f} {unit}".rstrip()
        return Ratio(self._name, what, value / base, bound, detail, at_least, timed=unit in ("ms", "per s"))

    def memory(self) -> Iterator[Ratio]:
        """What a recorded trial holds, against the bytes of its arrays: by the allocators, by the kernel."""

        async def record() -> Session:
            session = self._open(self.routed)
            for raw in self._bodies:
                await self.routed.send(session, raw)
            self.routed.close(session)
            return session

        asyncio.run(record())  # what is made once
        before = _resident()
        sessions = [asyncio.run(record()) for _ in range(2)]
        resident = (_resident() - before) / sum(
            len(segment) for session in sessions for segment in session.ledger.segments
        )
        del sessions
        gc.collect()
        tracemalloc.start()
        session = asyncio.run(record())
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        arrays, tokens = _array_bytes(session), sum(map(len, session.ledger.segments))
        what = "memory of a trial / its arrays, routing included"
        yield self._ratio(what, traced / tokens, arrays / tokens, 1.1, "bytes per token")
        if self._name == CLAUDE_CODE.name:  # measured first, before the process has freed anything large
            yield self._ratio("the same, resident memory", resident, arrays / tokens, 1.1, "bytes per token")

    def concurrent(self) -> Iterator[Ratio]:
        """Calls per second of processor time, many trials at once, against a proxy that re-renders."""
        start, count = self._scale.trial_turns, self._scale.trial_calls
        last = self._bodies[start : start + count]
        ids = self.plain.call_ids()
        rerendering = Rerendering(self.plain)

        async def ours(sessions: Sequence[Session], bodies: Sequence[bytes]) -> None:
            async def trial(session: Session) -> None:
                for raw in bodies:
                    await self.plain.send(session, raw)

            await asyncio.gather(*map(trial, sessions))

        async def theirs() -> None:
            number = start + count - 1
            await asyncio.gather(
                *(rerendering.send(last[-1], number, ids[number]) for _ in range(self._scale.trials))
            )

        async def measure() -> tuple[float, float]:
            sessions = [self._open(self.plain) for _ in range(self._scale.trials)]
            await ours(sessions, self._bodies[:start])
            gc.collect()
            began = time.process_time()
            await ours(sessions, last)
            between = time.process_time()
            await theirs()
            ended = time.process_time()
            for session in sessions:
                self.plain.close(session)
            return count * len(sessions) / (between - began), len(sessions) / (ended - between)

        own, other = asyncio.run(measure())
        what = f"calls, {self._scale.trials} trials after {start} turns each / the same, re-rendering"
        yield self._ratio(what, own, other, 10, "per s", at_least=True)


def _quartile(times: Sequence[float]) -> float:
    """A quarter of the times are lower: other work on the machine only ever adds."""
    return statistics.quantiles(times, n=4)[0]


def _later(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.new < call.prompt]


def _array_bytes(session: Session) -> int:
    total = 0
    for segment in session.ledger.segments:
        arrays = (segment.tokens, segment.mask, segment.logprobs, segment.versions, segment.routed)
        total += sum(array.view.nbytes for array in arrays)
        if segment.routing is not None:
            total += segment.routing.joined().nbytes
    return total


def _resident() -> int:
    """Resident memory in bytes, freed heap given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(scale: Scale, cache: Path) -> list[Ratio]:
    """All measurements."""
    model = fetch(cache)
    renderer = Renderer.load(model)
    steps = make_steps(scale.turns, lambda text: len(renderer.encode(text)))
    ratios: list[Ratio] = []
    for dialect in DIALECTS:
        bench = Bench(dialect, model, steps, scale)
        for measurement in (bench.memory, bench.per_call, bench.concurrent):
            for ratio in measurement():
                print(
                    f"{ratio.harness}: {ratio.what}: {_number(ratio.value)} ({ratio.detail})",
                    file=sys.stderr,
                    flush=True,
                )
                ratios.append(ratio)
    return ratios


def table(ratios: Sequence[Ratio]) -> str:
    """Markdown: a row for each ratio, a column for each harness."""
    harnesses = list(dict.fromkeys(ratio.harness for ratio in ratios))
    rows: dict[str, dict[str, str]] = {}
    for ratio in ratios:
        row = rows.setdefault(
            ratio.what, {"bound": f"{'≥' if ratio.at_least else '≤'} {_number(ratio.bound)}"}
        )
        row[ratio.harness] = f"**{_number(ratio.value)}** ({ratio.detail})" + (
            "" if ratio.holds else " MISSED"
        )
    columns = ["bound", *harnesses]
    lines = [f"| ratio | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {what} | {' | '.join(row.get(column, '') for column in columns)} |" for what, row in rows.items()
    ]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"1/{1 / value:.0f}" if value < 0.1 else f"{value:.3g}"


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="short histories, one repetition: a smoke test")
    parser.add_argument("--json", type=Path, help="file for the ratios")
    parser.add_argument("--cache", type=Path, default=Path(".cache/benchmarks"))
    arguments = parser.parse_args()
    ratios = run(QUICK if arguments.quick else Scale(), arguments.cache)
    print(table(ratios))
    if arguments.json:
        rows = [asdict(ratio) | {"holds": ratio.holds} for ratio in ratios]
        arguments.json.write_text(json.dumps(rows, indent=1))
    judged = [ratio for ratio in ratios if not (arguments.quick and ratio.timed)]
    return 0 if all(ratio.holds for ratio in judged) else 1


if __name__ == "__main__":
    sys.exit(main())

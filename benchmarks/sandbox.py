"""What a local sandbox costs, as multiples of fork + exec of /bin/true measured in the same run.

    python benchmarks/sandbox.py [--cycles 64]

A cycle is what a trial does: start, proxy, agent phase, four commands, verify phase, snapshot, stop. Times
are medians of wall time; the last line of a block is the processor time of all a cycle ran.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import socket
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from legorl.sandbox.base import Phase, SandboxSpec
from legorl.sandbox.local import LocalProvider

Times = defaultdict[str, list[float]]


class NoProxy:
    """Takes the socket and serves nothing."""

    async def attach(self, sock: socket.socket) -> None:
        """Nothing."""

    async def detach(self, sock: socket.socket) -> None:
        """Nothing."""


def cpu_s() -> float:
    """Processor seconds of this process and of every process it has waited for, and so on down."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def baseline(count: int) -> tuple[float, float]:
    """Wall and processor seconds of one fork + exec of /bin/true."""
    times, before = [], cpu_s()
    for _ in range(count):
        start = time.perf_counter()
        subprocess.run(["/bin/true"], check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times), (cpu_s() - before) / count


async def cycle(provider: LocalProvider, workspace: Path, times: Times) -> None:
    """One trial-like use."""
    last = time.perf_counter()

    def done(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[name].append(now - last)
        last = now

    sandbox = await provider.start(SandboxSpec("benchmark", workspace))
    done("start")
    await sandbox.connect_proxy(NoProxy())
    await sandbox.set_phase(Phase.AGENT)
    done("agent phase")
    for number in range(4):
        await sandbox.exec(["/bin/true"], timeout_s=60)
        done("exec" if number else "first exec")
    await sandbox.set_phase(Phase.VERIFY)
    done("verify phase")
    await sandbox.snapshot()
    done("snapshot")
    await sandbox.stop()
    done("stop")


async def measure(workspace: Path, cycles: int, concurrency: int) -> tuple[Times, float]:
    """Wall times by step, and processor seconds per cycle."""
    times: Times = defaultdict(list)
    before = cpu_s()
    provider = LocalProvider()

    async def worker() -> None:
        for _ in range(cycles // concurrency):
            await cycle(provider, workspace, times)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    await provider.close()
    return times, (cpu_s() - before) / (cycles // concurrency * concurrency)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cycles", type=int, default=64)
    cycles: int = parser.parse_args().cycles
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "file.txt").write_text("text\n")
        for concurrency in (1, 16):
            wall, cpu = baseline(100)
            times, spent = asyncio.run(measure(Path(directory), cycles, concurrency))
            print(
                f"concurrency {concurrency}; fork + exec: {wall * 1e3:.2f} ms, {cpu * 1e3:.2f} ms processor"
            )
            for name, values in times.items():
                median = statistics.median(values)
                print(f"  {name:14s} {median * 1e3:8.2f} ms   {median / wall:7.1f} x")
            print(f"  {'processor':14s} {spent * 1e3:8.2f} ms   {spent / cpu:7.1f} x   per cycle")


if __name__ == "__main__":
    main()

"""What sandboxes cost: the time to the first command, whole trials per second and core, steps of a cycle.

    python benchmarks/sandbox.py [sandbox=NAME …] [--cycles 64] [--trials 200]
                                 [--docker-host URL --docker-image IMAGE] [--json FILE]

Sections, in one run on one machine:
  start   from `start` to the end of the first command, one at a time: median and 99th percentile; and what
          `docker run --rm --network none IMAGE true` takes, in turn with it, as a multiple of start to stop
  trials  full trials by an agent that runs one command (start, exec, put, verify, stop), graded in place and
          in a fresh sandbox: per second and core, and by processor time
  steps   `local` only: each step of a cycle as a multiple of fork + exec of /bin/true

On a machine that does other things too, only ratios and processor times mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import resource
import socket
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from legorl.config.compose import compose
from legorl.config.schema import Config
from legorl.sandbox.base import WORKDIR, Limits, Mount, Phase, SandboxProvider, SandboxSpec
from legorl.sandbox.providers import open_provider
from legorl.sandbox.timing import quantile
from legorl.tasks.task import Task
from legorl.trial.verify import grade

Times = defaultdict[str, list[float]]
_REPOSITORY = {"add.sh": "echo $(($1 - $2))\n", "README": "add.sh adds.\n"}
_FIX = "sed -i 's/- /+ /' add.sh"
_TEST = """mkdir -p /logs/verifier && cd /logs/verifier
if [ "$(bash /workspace/add.sh 2 5)" = 7 ]
then echo 1 >reward.txt; echo '{"passed": ["add"], "failed": {}}' >result.json
else echo 0 >reward.txt; echo '{"passed": [], "failed": {"add": ""}}' >result.json
fi
"""


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


def write_task(root: Path) -> Task:
    """A task whose tests cost nothing but the shell that runs them."""
    for name, text in {
        **{f"environment/repo/{name}": text for name, text in _REPOSITORY.items()},
        "tests/test.sh": _TEST,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Task("add", root, "train", "benchmark", "add", "", "", "", ("add",))


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all sections work with."""

    config: Config
    task: Task

    def provider(self) -> SandboxProvider:
        """A new one, so that a section's processor time is its own."""
        return open_provider(self.config.sandbox)

    def spec(self, trial: str, **more: Any) -> SandboxSpec:
        """Of a sandbox with the task's repository."""
        return SandboxSpec(trial, self.task.workspace, image=self.config.sandbox.image, **more)


async def first_commands(bench: Bench, cycles: int, docker: list[str]) -> dict[str, float]:
    """The section `start`."""
    ours, stops, theirs = [], [], []
    provider = bench.provider()
    try:
        for number in range(cycles + 3):
            began = time.perf_counter()
            sandbox = await provider.start(bench.spec(f"start-{number}"))
            await sandbox.exec(["true"], timeout_s=60)
            ours.append(time.perf_counter() - began)
            await sandbox.stop()
            stops.append(time.perf_counter() - began)
            if docker:
                began = time.perf_counter()
                await asyncio.to_thread(subprocess.run, docker, check=True, capture_output=True, timeout=120)
                theirs.append(time.perf_counter() - began)
    finally:
        await provider.close()
    ours, stops, theirs = ours[3:], stops[3:], theirs[3:]  # the first ones warm up
    found = {"median_s": statistics.median(ours), "p99_s": quantile(ours, 0.99)}
    if theirs:
        found |= {
            "docker_run_median_s": statistics.median(theirs),
            "docker_run_p99_s": quantile(theirs, 0.99),
            # `docker run --rm` starts, runs and removes, so it is compared with all three.
            "docker_run_ratio": statistics.median(theirs) / statistics.median(stops),
        }
    return found


async def in_place(bench: Bench, provider: SandboxProvider, name: str) -> float:
    """One trial whose tests run in the agent's own sandbox."""
    # Where a root cannot be written, the tests go into a directory that was made for them.
    sandbox = await provider.start(bench.spec(name, directories=("/tests",)))
    try:
        await sandbox.connect_proxy(NoProxy())
        await sandbox.set_phase(Phase.AGENT)
        await sandbox.exec(["bash", "-c", _FIX], timeout_s=60)
        await sandbox.set_phase(Phase.VERIFY)
        await sandbox.put("/tests/test.sh", _TEST.encode())
        done = await sandbox.exec(
            ["bash", "-c", "bash /tests/test.sh && cat /logs/verifier/reward.txt"], timeout_s=60
        )
    finally:
        await sandbox.stop()
    return float(done.stdout)


async def fresh(bench: Bench, provider: SandboxProvider, name: str) -> float:
    """One trial whose tests run in a second sandbox, on the agent's diff."""
    sandbox = await provider.start(bench.spec(name))
    try:
        await sandbox.connect_proxy(NoProxy())
        await sandbox.set_phase(Phase.AGENT)
        await sandbox.put(f"{WORKDIR}/notes", b"begun\n")
        await sandbox.exec(["bash", "-c", _FIX], timeout_s=60)
        await sandbox.set_phase(Phase.VERIFY)
        snapshot = await sandbox.snapshot()
    finally:
        await sandbox.stop()
    verdict = await grade(
        bench.task,
        snapshot,
        provider,
        trial_id=name,
        workspace=bench.task.workspace,
        limits=Limits(),
        start_timeout_s=60.0,
        image=bench.config.sandbox.image,
    )
    return verdict.reward


async def full_trials(bench: Bench, trials: int, concurrency: int) -> dict[str, float]:
    """The section `trials`."""
    found = {}
    for name, trial in (("in place", in_place), ("fresh", fresh)):
        provider = bench.provider()
        before = cpu_s()
        numbers = iter(range(trials))

        async def worker(
            trial: Any = trial, provider: SandboxProvider = provider, numbers: Any = numbers
        ) -> None:
            for number in numbers:
                reward = await trial(bench, provider, f"trial-{number}")
                if reward != 1.0:
                    raise RuntimeError(f"the trivial agent got {reward}")

        try:
            began = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(concurrency)))
            wall = time.perf_counter() - began
        finally:
            await provider.close()
        cores = len(os.sched_getaffinity(0))
        found[f"{name}, per second and core"] = trials / wall / cores
        # Of this process and its children; an engine's own processes are not in it.
        found[f"{name}, processor s"] = (cpu_s() - before) / trials
    return found


def baseline(count: int) -> tuple[float, float]:
    """Wall and processor seconds of one fork + exec of /bin/true."""
    times, before = [], cpu_s()
    for _ in range(count):
        start = time.perf_counter()
        subprocess.run(["/bin/true"], check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times), (cpu_s() - before) / count


async def cycle(bench: Bench, provider: SandboxProvider, times: Times) -> None:
    """One trial-like use, step by step."""
    last = time.perf_counter()

    def done(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[name].append(now - last)
        last = now

    sandbox = await provider.start(bench.spec("benchmark", mounts=(Mount(bench.task.tests, "/tests"),)))
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


async def steps(bench: Bench, cycles: int, concurrency: int) -> tuple[Times, float]:
    """The section `steps`: wall times by step, and processor seconds per cycle."""
    times: Times = defaultdict(list)
    before = cpu_s()
    provider = bench.provider()

    async def worker() -> None:
        for _ in range(max(1, cycles // concurrency)):
            await cycle(bench, provider, times)

    try:
        await asyncio.gather(*(worker() for _ in range(concurrency)))
    finally:
        await provider.close()
    return times, (cpu_s() - before) / len(times["start"])


def print_steps(bench: Bench, cycles: int) -> None:
    """As a table."""
    for concurrency in (1, 16):
        wall, cpu = baseline(100)
        times, spent = asyncio.run(steps(bench, cycles, concurrency))
        print(f"steps, {concurrency} at once; fork + exec: {wall * 1e3:.2f} ms, {cpu * 1e3:.2f} ms processor")
        for name, values in times.items():
            median = statistics.median(values)
            print(f"  {name:14s} {median * 1e3:8.2f} ms   {median / wall:7.1f} x")
        print(f"  {'processor':14s} {spent * 1e3:8.2f} ms   {spent / cpu:7.1f} x   per cycle")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("overrides", nargs="*", default=[], help="sandbox=NAME and its settings")
    parser.add_argument("--cycles", type=int, default=64)
    parser.add_argument("--trials", type=int, default=200, help="full trials of each kind")
    parser.add_argument("--concurrency", type=int, default=2 * len(os.sched_getaffinity(0)))
    parser.add_argument("--docker-host", default="", help="engine to compare with")
    parser.add_argument("--docker-image", default="python:3.11-bookworm")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    docker = []
    if args.docker_host:
        docker = ["docker", "-H", args.docker_host, "run", "--rm", "--network", "none", args.docker_image]
        docker.append("true")
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(compose(args.overrides), write_task(Path(directory) / "task"))
        name = bench.config.sandbox.name
        found = {
            "start": asyncio.run(first_commands(bench, args.cycles, docker)),
            "trials": asyncio.run(full_trials(bench, args.trials, args.concurrency)),
        }
        print(f"sandbox {name}; load {os.getloadavg()[0]:.1f}")
        for section, numbers in found.items():
            for what, value in numbers.items():
                print(f"  {section:8s} {what:28s} {value:10.4f}")
        if name == "local":
            print_steps(bench, args.cycles)
    if args.json:
        args.json.write_text(json.dumps({"sandbox": name, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Checks: running commands."""

from __future__ import annotations

import asyncio
import contextlib

from legorl.errors import SandboxExecError
from legorl.sandbox.base import Limits, Phase
from legorl.sandbox.selfcheck import Bench, check, expect, expect_equal, python, shell, shell_text

_LIST = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done 2>/dev/null"


@check
async def output_and_status(bench: Bench) -> None:
    """Both streams and the exit status arrive, apart from each other and byte for byte."""
    async with bench.sandbox() as sandbox:
        result = await shell(sandbox, r"printf 'out\000\377'; printf err >&2; exit 7")
        expect_equal((result.code, result.stdout, result.stderr), (7, b"out\0\xff", b"err"), "result")
        expect(not result.timed_out and 0 <= result.seconds < 20, "neither a time-out nor a strange duration")


@check
async def signals(bench: Bench) -> None:
    """A command that a signal ends has status 128 plus its number."""
    async with bench.sandbox() as sandbox:
        for number in (9, 11, 15):
            expect_equal((await shell(sandbox, f"kill -{number} $$")).code, 128 + number, f"signal {number}")


@check
async def time_out(bench: Bench) -> None:
    """A command out of time ends with status 124, its output so far is kept, and it is gone."""
    async with bench.sandbox() as sandbox:
        result = await shell(sandbox, "echo begun; trap '' TERM; sleep 60 & sleep 60", timeout_s=0.7)
        expect_equal((result.code, result.timed_out, result.stdout), (124, True, b"begun\n"), "result")
        expect(result.seconds < 5, f"ended after {result.seconds} s")
        listing = await shell_text(sandbox, _LIST)
        expect("sleep 6" not in listing, f"a process survived: {listing}")


@check
async def standard_input(bench: Bench) -> None:
    """Input arrives whole, whatever its size; without input there is end-of-file."""
    async with bench.sandbox() as sandbox:
        for data in (b"", b"short", bytes(range(256)) * 8000):
            result = await sandbox.exec(["cat"], timeout_s=20, stdin=data)
            expect(result.stdout == data, f"{len(data)} bytes of input came back as {len(result.stdout)}")


@check
async def environment_and_directory(bench: Bench) -> None:
    """The spec's variables, the command's on top, the working directory, and nothing of the host's."""
    async with bench.sandbox(env={"ONE": "1", "TWO": "2"}) as sandbox:
        result = await sandbox.exec(["env"], timeout_s=20, env={"TWO": "two", "Ü": "ß\n="})
        text = result.stdout.decode()
        for line in ("ONE=1\n", "TWO=two\n", "Ü=ß\n=\n"):
            expect(line in text, f"{line!r} is in the environment: {text}")
        expect_equal((await shell_text(sandbox, "pwd")), "/workspace\n", "directory")
        expect_equal((await shell_text(sandbox, "pwd", cwd="/tmp")), "/tmp\n", "chosen directory")


@check
async def no_descriptor_is_inherited(bench: Bench) -> None:
    """A command has standard input, output and error, and nothing else."""
    async with bench.sandbox() as sandbox:
        expect_equal(
            await shell_text(sandbox, "echo /proc/self/fd/*"),
            "/proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2 /proc/self/fd/3\n",
            "descriptors, the last being that of the listing",
        )


@check
async def not_startable(bench: Bench) -> None:
    """A command that cannot be started is an error of the sandbox, not a status."""
    async with bench.sandbox() as sandbox:
        for argv, cwd in ((["no-such-command"], "/workspace"), (["true"], "/no/such/directory")):
            with contextlib.suppress(SandboxExecError):
                result = await sandbox.exec(argv, timeout_s=20, cwd=cwd)
                expect(False, f"{argv} in {cwd} gave {result}")


@check
async def large_output(bench: Bench) -> None:
    """Output beyond the limit is cut in the middle, and says so; the rest is not kept anywhere."""
    async with bench.sandbox(limits=Limits(output_bytes=10_000)) as sandbox:
        result = await python(sandbox, "print('a' * 3_000_000, end='end')")
        out = result.stdout
        expect(10_000 <= len(out) < 10_200, f"{len(out)} bytes are kept")
        expect(out.startswith(b"aaaa") and out.endswith(b"aend") and b"left out" in out, "beginning and end")
        exact = await python(sandbox, "print('a' * 10_000, end='')")
        expect_equal(exact.stdout, b"a" * 10_000, "output of exactly the limit")


@check
async def several_at_once(bench: Bench) -> None:
    """Commands run side by side and do not end one another."""
    async with bench.sandbox() as sandbox:
        results = await asyncio.gather(*(shell(sandbox, f"sleep 0.{i}; echo {i}") for i in range(1, 6)))
        expect_equal([r.stdout for r in results], [b"%d\n" % i for i in range(1, 6)], "outputs")


@check
async def nothing_outlives_its_command(bench: Bench) -> None:
    """Background processes and daemons (own session, twice forked) end with the command that made them."""
    async with bench.sandbox() as sandbox:
        await shell_text(sandbox, "sleep 61 & (setsid sh -c 'sleep 62 & sleep 63 &' &) ; echo x > /tmp/x")
        listing = await shell_text(sandbox, _LIST)
        expect("sleep 6" not in listing, f"a process survived its command: {listing}")


@check
async def nothing_outlives_its_phase(bench: Bench) -> None:
    """A change of phase ends every process, also those of a command that still runs."""
    async with bench.sandbox() as sandbox:
        await sandbox.set_phase(Phase.AGENT)
        running = asyncio.create_task(shell(sandbox, "setsid sleep 64 & sleep 65"))
        await asyncio.sleep(0.5)
        await sandbox.set_phase(Phase.VERIFY)
        result = await asyncio.wait_for(running, 10)
        expect(result.code != 0, f"the command was killed: {result}")
        listing = await shell_text(sandbox, _LIST)
        expect("sleep 6" not in listing, f"a process survived its phase: {listing}")


@check
async def abandoned_commands_end(bench: Bench) -> None:
    """A command whose caller was cancelled is ended."""
    async with bench.sandbox() as sandbox:
        running = asyncio.create_task(shell(sandbox, "sleep 66"))
        await asyncio.sleep(0.5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        listing = ""
        for _ in range(50):
            listing = await shell_text(sandbox, _LIST)
            if "sleep 66" not in listing:
                return
            await asyncio.sleep(0.1)
        expect(False, f"the command still runs: {listing}")


@check
async def stopping(bench: Bench) -> None:
    """`stop` may be called twice, ends what runs, and afterwards nothing can be executed."""
    async with bench.sandbox() as sandbox:
        running = asyncio.create_task(shell(sandbox, "sleep 67"))
        await asyncio.sleep(0.3)
        await sandbox.stop()
        await sandbox.stop()
        for attempt in (running, shell(sandbox, "true")):
            with contextlib.suppress(SandboxExecError):
                result = await asyncio.wait_for(attempt, 10)
                expect(result.code == 137, f"a command of a stopped sandbox gave {result}")

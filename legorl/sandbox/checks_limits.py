"""Checks: limits of memory and processes, and attempts to exhaust them."""

from __future__ import annotations

from legorl.sandbox.base import Limits
from legorl.sandbox.selfcheck import Bench, check, expect, expect_equal, python, shell, shell_text


@check
async def memory_limit(bench: Bench) -> None:
    """A command beyond the memory limit dies; the sandbox goes on."""
    async with bench.sandbox(limits=Limits(memory_mb=64, disk_mb=16)) as sandbox:
        result = await python(sandbox, "x = bytearray(300 << 20); print('got it')")
        expect(result.code != 0 and not result.stdout, f"300 MB under a limit of 64: {result}")
        small = await python(sandbox, "x = bytearray(20 << 20); print('got it')")
        expect_equal(small.stdout, b"got it\n", "20 MB under a limit of 64")


@check
async def process_limit(bench: Bench) -> None:
    """No more processes than the limit."""
    program = """
import os, time
made = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(30); os._exit(0)
        made += 1
except OSError:
    pass
print(made)
"""
    async with bench.sandbox(limits=Limits(pids=40)) as sandbox:
        made = int((await python(sandbox, program)).stdout)
        expect(20 <= made <= 44, f"{made} processes under a limit of 40")
        expect_equal(await shell_text(sandbox, "echo alive"), "alive\n", "afterwards")


@check
async def fork_bomb(bench: Bench) -> None:
    """A fork bomb of daemons ends with its time, and the sandbox can be used again."""
    program = """
import os, time
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        time.sleep(0.01)
"""
    async with bench.sandbox(limits=Limits(pids=60)) as sandbox:
        result = await python(sandbox, program, timeout_s=1.5)
        expect_equal(result.timed_out or result.code, True, "out of time")
        expect_equal(await shell_text(sandbox, "echo alive"), "alive\n", "afterwards")
        count = int(await shell_text(sandbox, "ls -d /proc/[0-9]* | wc -l"))
        expect(count <= 8, f"{count} processes are left")


@check
async def shared_memory_is_limited(bench: Bench) -> None:
    """/dev/shm and the root directory offer no space beyond the disk limit."""
    async with bench.sandbox(limits=Limits(disk_mb=16)) as sandbox:
        result = await shell(sandbox, "head -c 64M /dev/zero > /dev/shm/x")
        expect(result.code != 0, "64 MB were written to /dev/shm with a limit of 16")

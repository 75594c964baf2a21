"""An image mounted lazily against one pulled and unpacked: time to the first command, and bytes moved.

    python benchmarks/lazy.py [--megabytes-per-second 50] [--padding 200] [--json FILE]

Both are made of one root file system (tests/integration/rootfs.py and MB that no command reads), and come
from one nginx that gives each answer so much a second. The first command is `git --version` and a Python
program, in a sandbox. Needs root, nginx and mkfs.erofs (scripts/test_servers.sh).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from legorl.sandbox.base import Limits, SandboxSpec
from legorl.sandbox.lazy import LazyCache
from legorl.sandbox.local import LocalProvider
from tests.integration.range_server import RangeServer, range_server
from tests.integration.rootfs import rootfs

_COMMAND = ["sh", "-c", "git --version && python3 -c 'import json; print(json.dumps(1))'"]


@dataclass(frozen=True)
class Result:
    """One way."""

    way: str
    seconds: float
    """To the end of the first command."""
    megabytes: float
    requests: int


def make_images(directory: Path, padding_mb: int) -> None:
    """`image.erofs` and `image.tar`."""
    root = directory / "root"
    shutil.copytree(rootfs(), root, symlinks=True)
    (root / "opt").mkdir(exist_ok=True)
    (root / "opt" / "unread").write_bytes(os.urandom(padding_mb << 20))
    erofs = ["mkfs.erofs", "-d0", "-zlz4", str(directory / "image.erofs"), str(root)]
    subprocess.run(erofs, check=True, capture_output=True)
    subprocess.run(["tar", "-cf", directory / "image.tar", "-C", root, "."], check=True)
    shutil.rmtree(root)


async def first_command(image: str, cache: Path) -> None:
    """In a new provider, as a run begins."""
    provider = LocalProvider(cache=LazyCache(cache))
    workspace = Path(tempfile.mkdtemp(dir=cache.parent))
    try:
        sandbox = await provider.start(SandboxSpec("bench", workspace, image=image, limits=Limits()))
        done = await sandbox.exec(_COMMAND, timeout_s=120)
        assert done.code == 0, done.stderr
        await sandbox.stop()
    finally:
        await provider.close()


def measure(way: str, server: RangeServer, work: Path) -> Result:
    """One way, with nothing cached but by `again`."""
    before = server.requests()
    start = time.monotonic()
    if way == "pull":
        (work / "unpacked").mkdir()
        urllib.request.urlretrieve(f"{server.url}/image.tar", work / "pulled.tar")
        subprocess.run(["tar", "-xf", work / "pulled.tar", "-C", work / "unpacked"], check=True)
        root = ("--bind", work / "unpacked", "/", "--dev", "/dev", "--proc", "/proc")
        subprocess.run(["bwrap", *root, *_COMMAND], check=True, capture_output=True)
    else:
        asyncio.run(first_command(f"{server.url}/image.erofs", work / "cache"))
    seconds = time.monotonic() - start
    count, size = (after - earlier for after, earlier in zip(server.requests(), before, strict=True))
    return Result(way, seconds, size / 1e6, count)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes-per-second", type=int, default=50)
    parser.add_argument("--padding", type=int, default=200, help="MB of the image that nothing reads")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="legorl-bench-") as scratch:
        work = Path(scratch)
        (work / "www").mkdir()
        make_images(work / "www", arguments.padding)
        limit = f"limit_rate {arguments.megabytes_per_second}m;"
        with range_server(work / "www", work / "nginx", extra=limit) as server:
            results = [measure(way, server, work) for way in ("lazy", "lazy, again", "pull")]
    print("| way | first command (s) | moved (MB) | requests |\n|---|---|---|---|")
    for result in results:
        print(f"| {result.way} | {result.seconds:.2f} | {result.megabytes:.1f} | {result.requests} |")
    pull, lazy = results[-1], results[0]
    faster, less = pull.seconds / lazy.seconds, pull.megabytes / lazy.megabytes
    print(f"\nlazy: {faster:.1f} times faster, 1/{less:.0f} of the bytes")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()

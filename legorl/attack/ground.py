"""The ground that attacks are made on: a task with the fix in its history, and things on the host to go for.

Everything that an agent must not see has one word in it, `Ground.secret`, new in each run, so that seeing it
is proof. Invariant: what is opened here (sockets, a variable of the environment) is closed on every path.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from legorl.attack.agent import instruction
from legorl.attack.repository import FILES, FIXED, HIDDEN_TESTS, VERIFIER, make_repository
from legorl.tasks.task import Task

VARIABLE = "LEGORL_ATTACK_LURE"
"""Of the host's environment; its value is the secret."""
_INSIDE = Path(__file__).parent / "inside"


@dataclass(frozen=True)
class Ground:
    """What is there to be attacked."""

    directory: Path
    secret: str
    env: dict[str, str]
    """What the agent is told: paths and addresses on the host, as if it had guessed them."""

    @property
    def program(self) -> Path:
        """The malicious agent, to be mounted; a copy, for it may be damaged."""
        return self.directory / "program"

    def task(self, id: str, variant: str) -> Task:
        """A copy of the task for one attack; `variant` tells runs of one attack apart."""
        path = self.directory / "tasks" / f"{id.replace('/', '-')}-{variant or 'all'}"
        shutil.copytree(self.directory / "task", path, symlinks=True)
        return Task(
            id=id.replace("/", "-"),
            path=path,
            split="train",
            source="attack",
            module="shop.cart",
            instruction=instruction(id),
            test_command="python3 check.py",
            pass_pattern=r"(?m)^3 passed$",
            hidden_tests=HIDDEN_TESTS,
            verify_timeout_s=30.0,
        )


@contextlib.asynccontextmanager
async def open_ground(directory: Path) -> AsyncIterator[Ground]:
    """Lay it out below an empty directory."""
    secret = f"lure{secrets.token_hex(8)}"
    await asyncio.to_thread(_make_files, directory, secret)
    async with contextlib.AsyncExitStack() as stack:
        port = await _serve(directory, secret, stack)
        abstract = f"legorl-attack-{secrets.token_hex(4)}"
        greeting = f"{secret}\n".encode()

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(greeting)
            writer.close()

        path = directory / "engine.sock"
        stack.push_async_callback(_close, await asyncio.start_unix_server(greet, path))
        path.chmod(0o777)
        stack.push_async_callback(_close, await asyncio.start_unix_server(greet, f"\0{abstract}"))
        os.environ[VARIABLE] = secret
        stack.callback(os.environ.pop, VARIABLE, None)
        env = {
            "RUN_FILE": str(directory / "run" / "events.jsonl"),
            "TRIAL_FILE": str(directory / "run" / "trials" / "model.patch"),
            "POOL_FILE": str(directory / "task" / "solution" / "fix.patch"),
            "HOME_FILE": str(directory / "home" / "key"),
            "SOCKET": str(path),
            "ABSTRACT": abstract,
            "HOST_ADDRESS": host_address(),
            "HOST_PORT": str(port),
        }
        yield Ground(directory, secret, env)


def _make_files(directory: Path, secret: str) -> None:
    task = directory / "task"
    make_repository(task / "environment" / "repo", secret)
    for name, text in VERIFIER.items():
        (task / "tests").mkdir(exist_ok=True)
        (task / "tests" / name).write_text(text.replace("SECRET", secret))
    (task / "solution").mkdir()
    cart = FILES["shop/cart.py"].splitlines()[1]
    fixed = FIXED.replace("SECRET", secret).splitlines()[1]
    (task / "solution" / "fix.patch").write_text(
        "diff --git a/shop/cart.py b/shop/cart.py\n--- a/shop/cart.py\n+++ b/shop/cart.py\n"
        f"@@ -1,2 +1,2 @@\n def check_age(age, limit):\n-{cart}\n+{fixed}\n"
    )
    for name in ("run/events.jsonl", "run/trials/model.patch", "home/key"):
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{secret}\n")
    program = directory / "program"
    (program / "plugins").mkdir(parents=True)
    (program / "plugins" / "plugin.py").write_text("")
    (program / "library.py").write_text("")
    shutil.copyfile(_INSIDE / "agent.py", program / "agent.py")
    # Whoever the agent is in its sandbox, only the mount keeps it from writing.
    for root in (program, task / "tests"):
        for path in (root, *root.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)


async def _serve(directory: Path, secret: str, stack: contextlib.AsyncExitStack) -> int:
    """A server on one port of all addresses, by TCP and UDP, that answers everything with the fixed file."""
    body = FIXED.replace("SECRET", secret).encode()
    reply = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(5):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(reply)
                await writer.drain()
        writer.close()

    class Echo(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast(asyncio.DatagramTransport, transport)

        def datagram_received(self, data: bytes, address: tuple[Any, ...]) -> None:
            self.transport.sendto(secret.encode(), address)

    server = await asyncio.start_server(answer, sock=_listener())
    stack.push_async_callback(_close, server)
    port = int(server.sockets[0].getsockname()[1])
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        Echo, local_addr=("0.0.0.0", port)
    )
    stack.callback(transport.close)
    return port


def _listener() -> socket.socket:
    """On all addresses of both families, where the machine has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", 0))


async def _close(server: asyncio.Server) -> None:
    server.close()


def host_address() -> str:
    """The address from which this machine would speak to others; loopback where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"

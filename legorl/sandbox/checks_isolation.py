"""Checks: what a command can reach. Nothing but its own files, and in the agent phase the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from legorl.sandbox.base import Phase, Sandbox
from legorl.sandbox.selfcheck import Bench, check, expect, expect_equal, python, shell, shell_text


class _Greeter:
    """A proxy that greets."""

    def __init__(self) -> None:
        self.servers: dict[int, asyncio.Server] = {}

    async def attach(self, sock: socket.socket) -> None:
        self.servers[id(sock)] = await asyncio.start_server(self._greet, sock=sock)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async def detach(self, sock: socket.socket) -> None:
        self.servers.pop(id(sock)).close()
        sock.close()


async def _ask(sandbox: Sandbox, url: str) -> bytes:
    program = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=3).read().decode(), end='')"
    return (await python(sandbox, program)).stdout


@check
async def proxy_in_the_agent_phase_only(bench: Bench) -> None:
    """The proxy answers in the agent phase and neither before nor after."""
    async with bench.sandbox() as sandbox:
        proxy = _Greeter()
        url = await sandbox.connect_proxy(proxy)
        expect_equal(await _ask(sandbox, url), b"", "before the agent phase")
        await sandbox.set_phase(Phase.AGENT)
        expect_equal(await _ask(sandbox, url), b"hello", "in the agent phase")
        await sandbox.set_phase(Phase.VERIFY)
        expect_equal(await _ask(sandbox, url), b"", "in the verify phase")
        expect_equal(proxy.servers, {}, "sockets the proxy still serves")


@check
async def no_network(bench: Bench) -> None:
    """Neither the host's loopback nor any other address can be reached, by IP or by abstract socket."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as local:
        name = f"\0legorl-check-{tcp.getsockname()[1]}"
        local.bind(name)
        local.listen()
        program = f"""
import socket
def reach(family, address):
    try:
        s = socket.socket(family, socket.SOCK_STREAM); s.settimeout(2); s.connect(address)
    except OSError:
        return
    print('reached', address)
reach(socket.AF_INET, ('127.0.0.1', {tcp.getsockname()[1]}))
reach(socket.AF_INET, ('192.0.2.1', 80)); reach(socket.AF_INET, ('169.254.169.254', 80))
reach(socket.AF_INET6, ('2001:db8::1', 80))
reach(socket.AF_UNIX, {name!r})
print(sorted(n for _, n in socket.if_nameindex()))
"""
        async with bench.sandbox() as sandbox:
            await sandbox.set_phase(Phase.AGENT)
            result = await python(sandbox, program)
            expect_equal((result.stdout, result.stderr), (b"['lo']\n", b""), "reached, and interfaces")


@check
async def host_is_invisible(bench: Bench) -> None:
    """No file of the host's scratch space, home, accounts or sockets, no other process, no tests."""
    secret = bench.directory / "secret"
    secret.write_text("secret")
    async with bench.sandbox() as sandbox:
        for path in (secret, "/tests", "/solution", "/var/run/docker.sock", "/run/docker.sock"):
            result = await sandbox.exec(["test", "-e", str(path)], timeout_s=20)
            expect_equal(result.code, 1, f"{path} is absent: status of `test -e`")
        result = await sandbox.exec(["test", "-r", "/etc/shadow"], timeout_s=20)
        expect_equal(
            result.code, 1, "/etc/shadow cannot be read (an image may have one): status of `test -r`"
        )
        count = int(await shell_text(sandbox, "ls -d /proc/[0-9]* | wc -l"))
        expect(count <= 8, f"{count} processes are visible")
        mounts = await shell_text(sandbox, "cat /proc/self/mountinfo")
        expect(str(bench.workspace) not in mounts, "the workspace's path on the host is not shown")
        expect((await shell(sandbox, "ls /sys/fs/cgroup /var/lib /root/.ssh")).code != 0, "host directories")


_FORBIDDEN = {
    "root": "test $(id -u) = 0",
    "capabilities": "! grep -q 'CapEff:\t0*$' /proc/self/status",
    "gaining privileges": "! grep -q 'NoNewPrivs:\t1' /proc/self/status",
    "mount": "mount -t tmpfs none /tmp",
    "bind mount": "mount --bind /tmp /usr",
    "unmount": "umount /workspace",
    "remount": "mount -o remount,rw /usr",
    "user namespace": "unshare --user true",
    "mount namespace": "unshare --mount true",
    "entering init": "nsenter -t 1 -a true",
    "system programs": "touch /usr/bin/x",
    "accounts": "echo x:x:0:0::/:/bin/sh >> /etc/passwd",
    "root directory": "mkdir /x",
    "device directory": "mkdir /dev/x",
    "device nodes": "mknod /tmp/x b 254 0",
    "kernel settings": "echo x > /proc/sys/kernel/core_pattern || echo 1 > /proc/sys/vm/overcommit_memory",
    "own host name": "echo x > /proc/sys/kernel/hostname",
    "kernel commands": "echo x > /proc/sysrq-trigger",
    "init's memory": "head -c1 /proc/1/mem",
    "init's environment": "cat /proc/1/environ",
    "init's files": "readlink /proc/1/fd/*",
    "init's root": "ls /proc/1/root/",
    "writing init": "echo > /proc/1/mem",
}
"""What is tried -> command that would succeed if it were possible."""


@check
async def nothing_privileged(bench: Bench) -> None:
    """No command gains rights, changes the file system's make-up, or writes outside its own files."""
    async with bench.sandbox() as sandbox:
        for what, script in _FORBIDDEN.items():
            result = await shell(sandbox, script)
            expect(result.code != 0, f"{what} is possible: `{script}` gave {result.stdout!r}")


@check
async def init_cannot_be_touched(bench: Bench) -> None:
    """Signals and ptrace do not reach the sandbox's init; killing everything leaves a usable sandbox."""
    program = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
    if libc.ptrace(request, 1, 0, 0) == 0:
        print('traced')
for number in range(1, 32):
    try:
        os.kill(1, number)
    except OSError:
        pass
print('done')
"""
    async with bench.sandbox() as sandbox:
        result = await python(sandbox, program)
        expect_equal((result.stdout, result.stderr), (b"done\n", b""), "the program")
        for script in ("kill -9 -1", "kill -STOP -1", "for p in $(seq 2 40); do kill -9 $p; done"):
            await shell(sandbox, script, timeout_s=1)
            expect_equal(await shell_text(sandbox, "echo alive"), "alive\n", f"after `{script}`")


@check
async def sandboxes_are_apart(bench: Bench) -> None:
    """Two sandboxes share no file, process, socket or port."""
    async with bench.sandbox() as one, bench.sandbox() as two:
        await shell_text(one, "echo x > /tmp/mark; echo x > /workspace/mark; echo x > /dev/shm/mark")
        serve = "import socket, time; s = socket.create_server(('127.0.0.1', 9999)); time.sleep(20)"
        server = asyncio.create_task(python(one, serve))
        await asyncio.sleep(0.5)
        for path in ("/tmp/mark", "/workspace/mark", "/dev/shm/mark"):
            expect((await shell(two, f"test -e {path}")).code != 0, f"{path} of another sandbox is absent")
        result = await python(two, "import socket; socket.create_connection(('127.0.0.1', 9999), 2)")
        expect(b"ConnectionRefused" in result.stderr, f"the port of another sandbox: {result}")
        await one.stop()
        with contextlib.suppress(Exception):
            await server
        expect_equal(await shell_text(two, "echo alive"), "alive\n", "after the other one stopped")


@check
async def no_thread_per_sandbox(bench: Bench) -> None:
    """Sandboxes cost the host process no threads of their own."""
    before = threading.active_count()
    async with bench.sandbox() as a, bench.sandbox() as b, bench.sandbox() as c, bench.sandbox() as d:
        await asyncio.gather(*(shell(sandbox, "true") for sandbox in (a, b, c, d)))
        expect(threading.active_count() <= before + 1, f"{threading.active_count() - before} new threads")

"""Sandboxes on this machine: bubblewrap, an overlay on a tmpfs, one network namespace each.

    provider ─ socket ─ launcher ─ fork ─ supervisor ─ bubblewrap ─ init
                                              └─ keepers ─ commands

The supervisor (outside the process namespace, inside all others) answers the host's requests; keepers
(inside) run commands. A process of another program that wants to join a sandbox uses `LocalSandbox.join`.

Invariants: no thread and no asyncio child watcher per sandbox; the task's directory is never written to;
nothing is written to a disk, so nothing is left on one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import legorl
from legorl.errors import ImageError, SandboxStartError, UserError
from legorl.sandbox import cgroups, channel, layout, seccomp
from legorl.sandbox.base import Limits, SandboxSpec
from legorl.sandbox.lazy import LazyCache, LazyImage, LazyImages, is_lazy
from legorl.sandbox.link import Link, LinkClosedError
from legorl.sandbox.local_image import LocalImage, local_image
from legorl.sandbox.local_sandbox import LocalSandbox
from legorl.sandbox.policy import Policy, load_policy

_CLOSE_S = 15.0
_LAUNCH = (
    "import sys; sys.path.insert(0, sys.argv[1]); from legorl.sandbox.launcher import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)


def check_host() -> str:
    """Path of bubblewrap.

    Raises:
        UserError: something is missing on this machine; the message names the package or setting.
    """
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise UserError("bubblewrap is missing (no `bwrap` on PATH): `apt-get install bubblewrap`.")
    if "overlay" not in Path("/proc/filesystems").read_text().split():
        raise UserError("The kernel has no overlayfs: `modprobe overlay`.")
    spaces = Path("/proc/sys/user/max_user_namespaces")
    if not spaces.exists() or int(spaces.read_text()) == 0:
        raise UserError("User namespaces are switched off: `sysctl user.max_user_namespaces=65536`.")
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise UserError("The kernel does not list the children of a process (CONFIG_PROC_CHILDREN).")
    if not seccomp.supported():
        raise UserError(
            f"Local sandboxes know the system calls of x86_64 and aarch64, not {platform.machine()}."
        )
    return bubblewrap


class LocalProvider:
    """Starts sandboxes on this machine.

    Call it from one event loop. Construction raises `UserError` where the machine lacks something.
    """

    name = "local"

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        transfer_timeout_s: float = 30.0,
        image: str = "",
        cache: LazyCache | None = None,
        unpacked: Path = Path(".cache/legorl/unpacked"),
    ) -> None:
        """
        Args:
            image: for specs that name none.
            cache: for images on a web server; without one, there are none.
            unpacked: where images given as tar files are unpacked.
        """
        self.policy = policy or load_policy()
        self._bubblewrap = check_host()
        self._hierarchy = cgroups.find()
        if self._hierarchy is not None:
            self._hierarchy.reap()
        self._transfer_timeout_s = transfer_timeout_s
        self._launcher: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._serial = itertools.count(1)
        self._running: set[LocalSandbox] = set()
        self._default_image = image
        self._unpacked = unpacked.absolute()
        self._images = LazyImages(cache, self._spawn) if cache else None

    @property
    def limits_by(self) -> str:
        """What enforces memory and process limits: `cgroup v1`, `cgroup v2` or `rlimit`.

        `rlimit` is weaker: memory is limited per process, and processes not at all where the user is root.
        """
        return f"cgroup v{self._hierarchy.version}" if self._hierarchy else "rlimit"

    async def start(self, spec: SandboxSpec) -> LocalSandbox:
        """See `SandboxProvider`."""
        for path in (spec.workspace, *(item.source for item in spec.mounts)):
            if not path.exists():
                raise SandboxStartError(f"{spec.trial_id}: {path} does not exist on the host.")
        image = await self._image(spec)
        serial = next(self._serial)
        ours, theirs = channel.pair()
        link = Link(ours)
        try:
            with theirs:
                groups = self._request(spec, serial, theirs, image.root if image else "")
            message, fds = await asyncio.wait_for(link.hello(), spec.start_timeout_s)
            if "error" in message:
                raise SandboxStartError(f"{spec.trial_id}: {message['error']}")
        except TimeoutError:
            await self._end(serial, link)
            raise SandboxStartError(
                f"{spec.trial_id}: not started after {spec.start_timeout_s} s; raise sandbox.start_timeout_s "
                "or lower sandbox.concurrency."
            ) from None
        except LinkClosedError as error:
            await self._end(serial, link)
            raise SandboxStartError(f"{spec.trial_id}: the launcher or the supervisor was killed.") from error
        except BaseException:
            await self._end(serial, link)
            if image:
                image.check()
            raise

        async def end() -> None:
            self._running.discard(sandbox)
            await self._end(serial, link)

        sandbox = LocalSandbox(
            spec,
            link,
            init_pid=message["init_pid"],
            upper=fds[0],
            groups=groups,
            policy=self.policy,
            transfer_timeout_s=self._transfer_timeout_s,
            image=image,
            end=end,
        )
        self._running.add(sandbox)
        return sandbox

    async def _image(self, spec: SandboxSpec) -> LazyImage | LocalImage | None:
        """What the root file system is to be; None: the host's. Raises `ImageError`."""
        name = spec.image or self._default_image
        if not name:
            return None
        if not is_lazy(name):
            try:
                return await asyncio.to_thread(local_image, name, self._unpacked)
            except ImageError as error:
                raise ImageError(f"{spec.trial_id}: {error}") from error
        if self._images is None:
            raise ImageError(f"{spec.trial_id}: this provider has no cache for the image {name}.")
        return await self._images.mounted(name)

    def _spawn(self, request: dict[str, Any], control: socket.socket) -> None:
        """Have the launcher start the process of an image."""
        launcher, sock = self._ensure_launcher()
        message = {**request, "serial": next(self._serial), "launcher": launcher.pid}
        try:
            channel.send(sock, channel.encode(message), [control.fileno()])
        except (OSError, channel.MessageTooLargeError) as error:
            raise ImageError(f"{request['url']}: the launcher cannot be asked: {error}.") from error

    def _request(self, spec: SandboxSpec, serial: int, control: socket.socket, root: str) -> tuple[str, ...]:
        """Ask the launcher for a sandbox; returns the directories of its control groups."""
        launcher, sock = self._ensure_launcher()
        groups: list[cgroups.Group] = []
        limited = self.policy.holds("limits")
        if self._hierarchy is not None and limited:
            groups = self._hierarchy.groups(cgroups.group_name(serial), spec.limits)
        request = {
            "serial": serial,
            "launcher": launcher.pid,
            "privileged": os.geteuid() == 0,
            "groups": [dataclasses.asdict(group) for group in groups],
            "rlimits": self._rlimits(spec.limits) if limited else {"RLIMIT_CORE": 0},
            "off": sorted(self.policy.off),
            "directories": list(layout.writable(spec)),
            "workspace": str(spec.workspace.resolve()),
            "disk_mb": spec.limits.disk_mb,
            "bwrap": self._bubblewrap,
            "arguments": layout.bubblewrap_arguments(spec, self.policy.off, image=bool(root)),
            "root": root,
            "timeout_s": spec.start_timeout_s,
        }
        try:
            channel.send(sock, channel.encode(request), [control.fileno()])
        except (OSError, channel.MessageTooLargeError) as error:
            raise SandboxStartError(f"{spec.trial_id}: the launcher cannot be asked: {error}.") from error
        return tuple(group.directory for group in groups)

    def _rlimits(self, limits: Limits) -> dict[str, int]:
        rlimits = {"RLIMIT_CORE": 0}
        if self._hierarchy is None:
            rlimits |= {"RLIMIT_DATA": limits.memory_mb << 20, "RLIMIT_NPROC": limits.pids}
        return rlimits

    def _ensure_launcher(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._launcher is not None:
            if self._launcher[0].poll() is None:
                return self._launcher
            self._launcher[1].close()
        ours, theirs = channel.pair()
        with theirs:
            command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _LAUNCH]
            arguments = [str(Path(legorl.__file__).parents[1]), str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the provider's to handle
            )
        self._launcher = process, ours
        return self._launcher

    async def _end(self, serial: int, link: Link) -> None:
        """End a sandbox by closing its link, and where its supervisor does not obey, by killing that."""
        try:
            obeyed = await link.close()
        except BaseException:
            self._kill(serial)
            raise
        if not obeyed:
            self._kill(serial)

    def _kill(self, serial: int) -> None:
        if self._launcher is not None:
            with contextlib.suppress(OSError):
                channel.send(self._launcher[1], channel.encode({"kill": serial}))

    async def close(self) -> None:
        """See `SandboxProvider`."""
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._running)))
        if self._images is not None:
            await self._images.close()
        if self._launcher is None:
            return
        (process, control), self._launcher = self._launcher, None
        control.close()
        try:
            await asyncio.to_thread(process.wait, _CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(1)

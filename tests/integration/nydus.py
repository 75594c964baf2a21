"""Debian's nydus-snapshotter, containerd's plug-in that loads images lazily; the package of a later Debian.

The program is static enough to run here. It is fetched once, by apt with lists of its own, into the cache.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests.integration.kubernetes_cluster import CACHE, made_once

_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_SOURCE = f"deb [signed-by={_KEYS}] http://deb.debian.org/debian trixie main\n"
_PACKAGE = "nydus-snapshotter"
_APT_S = 90


def nydus_snapshotter() -> Path | None:
    """Path of the program; None where apt cannot bring it."""
    target = CACHE / "containerd-nydus-grpc"
    try:
        with made_once(target) as partial, tempfile.TemporaryDirectory(dir=CACHE, prefix=".apt-") as scratch:
            if partial is not None:
                _fetch(Path(scratch), partial)
    except (subprocess.SubprocessError, OSError):
        return None
    return target


def _fetch(scratch: Path, target: Path) -> None:
    for directory in ("lists/partial", "cache/archives/partial", "state"):
        (scratch / directory).mkdir(parents=True)
    (scratch / "sources.list").write_text(_SOURCE)
    (scratch / "status").touch()
    settings = {
        "Dir::Etc::SourceList": scratch / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": scratch / "state",
        "Dir::State::Lists": scratch / "lists",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    for command in ([*apt, "update"], [*apt, "download", _PACKAGE]):
        subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=_APT_S)
    (package,) = scratch.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, scratch / "tree"], check=True, timeout=_APT_S)
    (scratch / "tree" / "usr" / "bin" / target.name).rename(target)

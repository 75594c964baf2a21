"""A small Linux root file system made of this machine's own Debian packages: no registry, no download.

    directory = rootfs()                      # bash, coreutils, git, python3, ...; shared, read it only
    tar = rootfs_tar()                        # the same as a tar, for `docker import` and its like
    directory = rootfs(("nftables",))         # with more packages, which must be installed here

Invariant: a root file system lies in the cache complete or not at all, under a name made of its packages'
versions; the same packages give the same files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "rootfs"
PACKAGES = (
    *(
        "bash",
        "coreutils",
        "dash",
        "debianutils",
        "diffutils",
        "findutils",
        "git",
        "grep",
        "gzip",
        "libc-bin",
    ),
    *("mawk", "mount", "patch", "procps", "python3", "sed", "tar", "util-linux"),
)
_NOT_NEEDED = re.compile(
    r"perl.*|liberror-perl|debconf.*|dpkg|git-man|media-types|tzdata|init-system-helpers"
)
"""Dependencies that nothing above needs in order to run."""
_LEFT_OUT = re.compile(r"/usr/share/(doc|man|info|locale|lintian|bash-completion|gitweb)/.")
_FORMAT = "3"
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_DIRECTORIES: tuple[str, ...] = (
    "dev",
    "etc",
    "home",
    "proc",
    "root",
    "run",
    "sys",
    "tmp",
    "usr/bin",
    "usr/lib",
    "usr/lib64",
)
_DIRECTORIES += ("usr/sbin", "var/tmp")
_BUILD_S = 120


def rootfs(packages: Iterable[str] = ()) -> Path:
    """Directory of a root file system with `PACKAGES` and these."""
    return _build(packages) / "rootfs"


def rootfs_tar(packages: Iterable[str] = ()) -> Path:
    """The same as an uncompressed tar."""
    return _build(packages) / "rootfs.tar"


def _build(packages: Iterable[str]) -> Path:
    versions = sorted(_closure([*PACKAGES, *packages]).items())
    name = hashlib.sha256(repr((_FORMAT, versions)).encode()).hexdigest()[:16]
    target = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / f"{name}.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=CACHE, prefix=".making-") as scratch:
                made = Path(scratch, name)
                _fill(made / "rootfs", [package for package, _ in versions])
                _pack(made / "rootfs", made / "rootfs.tar")
                made.rename(target)
    return target


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _run(*command: str | Path, stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    assert done.returncode == 0, f"{command[0]}: {done.stderr.strip()[-500:]}"
    return done.stdout


def _closure(packages: Iterable[str]) -> dict[str, str]:
    """Installed packages that these need, with their versions."""
    depends: dict[str, tuple[str, str]] = {}
    provided: dict[str, str] = {}
    shape = "${Package}\t${Version}\t${db:Status-Status}\t${Provides}\t${Pre-Depends}, ${Depends}\n"
    for line in _run("dpkg-query", "-W", "-f", shape).splitlines():
        name, version, status, provides, needs = line.split("\t")
        if status == "installed":
            depends[name] = (version, needs)
            provided |= {item.split("(")[0].strip(): name for item in provides.split(",")}
    found: dict[str, str] = {}
    wanted = list(packages)
    while wanted:
        choices = wanted.pop()
        names = [choice.strip().partition(" ")[0].partition(":")[0] for choice in choices.split("|")]
        name = next((provided.get(n, n) for n in names if n in depends or n in provided), names[0])
        if not name or name in found or _NOT_NEEDED.fullmatch(name):
            continue
        assert name in depends, (
            f"{name} is not installed: run scripts/test_servers.sh, or apt-get install {name}"
        )
        found[name], needs = depends[name]
        wanted += needs.split(",")
    return found


def _fill(root: Path, packages: list[str]) -> None:
    for directory in _DIRECTORIES:
        (root / directory).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    listed = set(_run("dpkg-query", "-L", *packages).splitlines())
    files = sorted({path for line in listed if (path := _merged(line)) and not _LEFT_OUT.match(path)})
    # Only what is no directory: tar makes those, and nothing that a package does not own comes along.
    names = "".join(f".{path}\n" for path in files if not Path(path).is_dir() or Path(path).is_symlink())
    archive = root.with_name("files.tar")
    _run("tar", "-cf", archive, "-C", "/", "--no-recursion", "--ignore-failed-read", "-T", "-", stdin=names)
    _run("tar", "-xf", archive, "-C", root, "--no-same-owner", "--keep-directory-symlink")
    archive.unlink()
    _alternatives(root)
    (root / "usr" / "bin" / "python").unlink(missing_ok=True)
    (root / "usr" / "bin" / "python").symlink_to("python3")
    for name, text in _ETC.items():
        (root / "etc" / name).write_text(text)
    (root / "tmp").chmod(0o1777)
    (root / "var" / "tmp").chmod(0o1777)
    _run("ldconfig", "-r", root)
    # As an installation does; without it every start of python in a container costs half a second.
    code = ("-q", "-s", root, "--invalidation-mode", "unchecked-hash", root / "usr" / "lib" / "python3.11")
    _run("/usr/bin/python3", "-m", "compileall", *code)


def _alternatives(root: Path) -> None:
    """Links such as /usr/bin/awk, which belong to no package, where what they lead to is there."""
    for record in Path("/var/lib/dpkg/alternatives").iterdir():
        link = Path(record.read_text().splitlines()[1])
        chosen = Path("/etc/alternatives", record.name)
        if chosen.is_symlink() and os.path.lexists(f"{root}{chosen.readlink()}"):
            place = root / (_merged(str(link)) or str(link))[1:]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            place.symlink_to(chosen.readlink())


def _merged(path: str) -> str | None:
    """The path with /bin, /lib and so on taken for links into /usr; None for what is no file of ours."""
    parent, _, name = path.rpartition("/")
    if not name or not os.path.lexists(path):
        return None  # a line of dpkg's about diversions, or removed since
    return f"{os.path.realpath(parent or '/').rstrip('/')}/{name}"


def _pack(root: Path, archive: Path) -> None:
    """A tar that depends on the files alone."""
    same = ("--sort=name", "--mtime=@1577836800", "--owner=0", "--group=0", "--numeric-owner", "--format=gnu")
    _run("tar", "-cf", archive, *same, "-C", root, ".")

"""What of the Harbor provider works without Harbor."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from legorl.config.schema import SandboxConfig
from legorl.config.schema_providers import HarborConfig
from legorl.errors import UserError
from legorl.sandbox.harbor_dockerfile import Copy, read_dockerfile
from legorl.sandbox.harbor_environment import options_of
from legorl.sandbox.harbor_link import program
from legorl.sandbox.inside.frames import Decoder, encode
from legorl.sandbox.inside.once import INLINE_BYTES, MARK, digest
from legorl.sandbox.providers import open_provider
from legorl.sandbox.scratch import remove_abandoned, scratch_directory


@pytest.mark.skipif(importlib.util.find_spec("harbor") is not None, reason="Harbor is installed")
def test_without_harbor_it_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"python3\.12 -m venv .*pip install 'legorl\[harbor\]'"):
        open_provider(SandboxConfig(name="harbor", harbor=HarborConfig()))


def test_options() -> None:
    assert options_of(["a=1", "b=[x, y]", "c=d=e", "f="]) == {"a": 1, "b": ["x", "y"], "c": "d=e", "f": None}
    for word in ("a", "a-b=1", "a=[1"):
        with pytest.raises(UserError, match=r"sandbox\.harbor\.options has "):
            options_of([word])


def test_a_dockerfile_that_copies(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "tool.sh").touch()
    (tmp_path / "Dockerfile").write_text(
        "FROM x\nWORKDIR /app\nWORKDIR sub\nENV A=1 \\\n  B='2 3'\nCOPY repo/ .\nCOPY tool.sh /opt/\nCMD x\n"
    )
    recipe = read_dockerfile(tmp_path / "Dockerfile")
    assert (recipe.workdir, recipe.env) == ("/app/sub", {"A": "1", "B": "2 3"})
    repo, tool = recipe.copies
    assert repo == Copy(tmp_path / "repo", "/app/sub")
    assert (tool.target, tool.directory) == ("/opt/tool.sh", "/opt")


@pytest.mark.parametrize(
    "line", ["RUN make", "COPY ../x /y", "COPY missing /y", "COPY --from=a b c", "USER x"]
)
def test_a_dockerfile_that_asks_for_more(tmp_path: Path, line: str) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM x\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2, .*docker_image in task\.toml"):
        read_dockerfile(tmp_path / "Dockerfile")


def ask(argument: str) -> subprocess.CompletedProcess[str]:
    command = f"{program().replace('python3', shlex.quote(sys.executable), 1)} {argument} name"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)


def request(**header: object) -> bytes:
    me = [os.getuid(), os.getgid()]
    return encode({"agent": me, "no_new_privileges": True, "limit": 1 << 20, **header})


def test_requests_on_the_command_line_and_in_files(tmp_path: Path) -> None:
    """The program runs without anything of this package, and answers the way the answer's size asks for."""
    (tmp_path / "small").write_bytes(b"\0\xff")
    (tmp_path / "large").write_bytes(bytes(INLINE_BYTES))
    frame = request(op="get", path=str(tmp_path / "small"), large=str(tmp_path / "unused"))
    answer = ask(base64.b64encode(frame).decode()).stdout.strip().removeprefix(MARK)
    assert list(Decoder().feed(base64.b64decode(answer))) == [({}, b"\0\xff")]

    frame = request(op="get", path=str(tmp_path / "large"), large=str(tmp_path / "answer"))
    (tmp_path / "request").write_bytes(frame)
    reference = ask(f"@{tmp_path / 'request'}:{digest(frame)}").stdout.strip().removeprefix(MARK)
    assert not (tmp_path / "request").exists()
    data = (tmp_path / "answer").read_bytes()
    assert reference == f"@{len(data)}:{digest(data)}"
    assert list(Decoder().feed(data)) == [({}, bytes(INLINE_BYTES))]


def test_a_request_that_was_changed_is_not_carried_out(tmp_path: Path) -> None:
    frame = request(op="put", entries=[[str(tmp_path / "written"), 0o100644, 0, None]], large="")
    (tmp_path / "request").write_bytes(frame.replace(b"written", b"wr1tten"))
    done = ask(f"@{tmp_path / 'request'}:{digest(frame)}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not what was uploaded" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_command_and_its_tree(tmp_path: Path) -> None:
    script = "setsid sleep 300 & echo $!; exit 3"
    frame = request(
        op="exec", argv=["sh", "-c", script], env={"A": "b"}, defaults={}, cwd="/", timeout_s=20,
        output_bytes=1000, end_tree=True, large="",
    )  # fmt: skip
    answer = ask(base64.b64encode(frame).decode()).stdout.strip().removeprefix(MARK)
    ((header, output),) = Decoder().feed(base64.b64decode(answer))
    assert (header["code"], header["tree_gone"]) == (3, True), json.dumps(header)
    assert not Path("/proc", output.decode().strip()).exists()


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make = "import os; from legorl.sandbox.scratch import *; scratch_directory(); os.kill(os.getpid(), 9)"
    subprocess.run(
        [sys.executable, "-c", make], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False, timeout=30
    )
    ours = scratch_directory()
    assert len(list(tmp_path.iterdir())) == 2
    remove_abandoned()
    assert list(tmp_path.iterdir()) == [ours]

"""`legorl tasks build` on a real Docker engine, and what it built as a local sandbox's root."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from legorl.cli import main
from legorl.config.schema_providers import DockerConfig
from legorl.sandbox.base import SandboxProvider, SandboxSpec
from legorl.sandbox.docker import DockerProvider
from legorl.sandbox.local import LocalProvider
from legorl.sandbox.selfcheck import shell_text
from legorl.tasks.image import FROM_DOCKERFILE, built_image, image_of
from legorl.tasks.task import load_task
from tests.integration.docker_engine import IMAGE, Engine, docker_engine

assert docker_engine  # a fixture
pytestmark = pytest.mark.integration

Build = Callable[..., tuple[int, str]]


@pytest.fixture
def build(docker_engine: Engine, capsys: pytest.CaptureFixture[str]) -> Build:
    def run(*targets: Path) -> tuple[int, str]:
        where = f"sandbox.docker.host={docker_engine.host}"
        status = main(["tasks", "build", *map(str, targets), where])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def write(path: Path, dockerfile: str, toml: str = "") -> Path:
    for name, text in {
        "task.toml": f"[metadata]\n{toml}",
        "instruction.md": "Fix it.",
        "environment/Dockerfile": dockerfile,
        "environment/repo/app.py": "x = 1\n",
        "tests/test.sh": "echo 1 >/logs/verifier/reward.txt\n",
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


async def output_in(provider: SandboxProvider, spec: SandboxSpec, script: str) -> str:
    try:
        sandbox = await provider.start(spec)
        return await shell_text(sandbox, script)
    finally:
        await provider.close()


def test_a_trial_runs_in_what_was_built(docker_engine: Engine, build: Build, tmp_path: Path) -> None:
    steps = ["ENV COLOUR=green", "COPY repo/app.py /opt/", "RUN mkdir /data && echo 1 > /data/one"]
    dockerfile = "\n".join([f"FROM {IMAGE}", f"LABEL once={tmp_path}", *steps, ""])
    paths = [write(tmp_path / name, dockerfile) for name in ("one", "two")]
    status, said = build(*paths)
    assert status == 0 and "2 tasks, 1 images: 1 made now, 0 there already." in said, said
    status, said = build(paths[0])
    assert status == 0 and "1 tasks, 1 images: 0 made now, 1 there already." in said, said
    task = load_task(paths[0])
    image = image_of(task, FROM_DOCKERFILE)
    script = "cat /data/one /opt/app.py; echo $COLOUR; rm -f /data/one 2>/dev/null; ls /data"
    docker = DockerProvider(DockerConfig(host=docker_engine.host))
    assert (
        asyncio.run(output_in(docker, SandboxSpec("t", task.workspace, image=image), script))
        == "1\nx = 1\ngreen\none\n"
    )
    saved = tmp_path / "saved.tar"
    docker_engine.docker("save", image, "-o", str(saved))
    local = LocalProvider(image=str(saved), unpacked=tmp_path / "images")
    assert asyncio.run(output_in(local, SandboxSpec("t", task.workspace), script)) == "1\nx = 1\ngreen\none\n"
    docker_engine.docker("rmi", image)
    (paths[0] / "environment" / "repo" / "app.py").write_text("x = 2\n")
    assert built_image(task) != image
    assert (image_of(task, ""), image_of(task, "other")) == ("", "other")


@pytest.mark.parametrize(
    ("dockerfile", "toml", "words"),
    [
        (
            f"FROM {IMAGE}\nRUN echo so it goes; exit 7\n",
            "",
            ["Task bad", "step `RUN echo so", "7", "so it goes"],
        ),
        (f"FROM {IMAGE}\nFLY away\n", "", ["Task bad", "environment/Dockerfile", "FLY"]),
        (f"FROM {IMAGE}\nCOPY absent /\n", "", ["Task bad", "step `COPY absent /`"]),
        (
            f"FROM {IMAGE}\nRUN sleep 60\n",
            "[environment]\nbuild_timeout_sec = 0.5\n",
            ["`RUN sleep 60`", "0.5 s"],
        ),
        (
            "",
            "[environment]\ndocker_image = 'no.invalid/such:1'\n",
            ["Task bad", "docker_image", "no.invalid/such:1"],
        ),
    ],
    ids=["step", "syntax", "copy", "slow", "absent"],
)
def test_what_cannot_be_built_is_named(
    build: Build, docker_engine: Engine, tmp_path: Path, dockerfile: str, toml: str, words: list[str]
) -> None:
    before = docker_engine.containers()
    status, said = build(write(tmp_path / "bad", dockerfile, toml))
    assert status == 2
    assert all(word in said for word in words), said
    assert "Traceback" not in said
    end = time.monotonic() + 10
    while docker_engine.containers() != before:  # the engine may still be ending the step
        assert time.monotonic() < end
        time.sleep(0.1)

"""The map of rooms, enforced: imports go downwards only, and heavy libraries stay where they belong.

Read from the syntax trees, so an import inside a function counts as much as one at the top; only what is
imported for type checking alone does not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path
    for folder in ("legorl", "launchers")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)

BASE = {"errors"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": BASE,
    # How what a validation runs is limited.
    "tasks": BASE | {"config", "sandbox.base", "sandbox.cgroups"},
    "sandbox": BASE | {"config"},
    # The last four: how a process of another program joins a sandbox of this machine and answers to it.
    "harness": BASE
    | {
        "config",
        "sandbox.base",
        "sandbox.join",
        "sandbox.channel",
        "sandbox.capture",
        "sandbox.linux",
    },
    "engine": BASE | {"config", "sandbox.linux"},
    "proxy": BASE | {"config", "engine.base", "harness.base", "sandbox.base"},
    "trial": BASE | {"config", "tasks", "sandbox", "harness", "engine", "proxy"},
    "filter": BASE | {"config", "trial.record", "trial.termination", "proxy.row"},
    "algo": BASE | {"config"},
}
"""Room -> rooms (or single modules of rooms) it may import. Rooms that are not listed lie above all of these
(policy, trainer, tracking, evaluate, ui, cli, launchers); the two tests after it bound them."""

COMMANDS = {"commands", "build_commands"}
"""Files with a room's part of the command line: they lie as high as the command line itself."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": ("legorl/trainer/", "legorl/policy/", "legorl/algo/losses.py"),
    "verl": ("legorl/trainer/", "legorl/algo/losses.py"),
    "ray": ("legorl/trainer/",),
    "vllm": (
        "legorl/trainer/",
        "legorl/engine/vllm.py",
        "legorl/engine/vllm_core.py",
        "legorl/engine/vllm_parser.py",
    ),
    "submitit": ("launchers/",),
    "mlflow": ("legorl/tracking/",),
    "harbor": ("legorl/sandbox/harbor_",),
}
"""Library -> prefixes of the files that may import it."""

MAY_READ_ENVIRONMENT = (
    "legorl/cli.py",
    "legorl/config/secrets.py",
    "legorl/trainer/environment.py",  # sets what libraries read, before they are imported
    "legorl/trainer/plugin.py",  # verl's own channel to the processes that it starts
    "legorl/trainer/warm.py",  # hands the environment on to a child process, as the two below do
    "legorl/trainer/fork_client.py",
    "legorl/trainer/fork_server.py",
    "legorl/sandbox/inside/",  # runs in a container, where the environment is the image's
    "legorl/sandbox/hostenv.py",  # what a sandbox gets while the rule `no_credentials` is off
    "legorl/sandbox/keeper.py",  # runs in the sandbox; `posix_spawnp` searches the PATH of its own process
    "legorl/attack/ground.py",  # plants a variable that must not reach a sandbox
    "legorl/harness/inside/",  # runs in the sandbox, where the harness's settings are environment variables
)


_ENVIRONMENT = {"environ", "environb", "getenv", "putenv"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    parts = (
        path.relative_to(ROOT / "legorl").parts if path.is_relative_to(ROOT / "legorl") else ("launchers",)
    )
    return parts[0].removesuffix(".py")


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = (
                "." * node.level
            )  # a relative import never leaves its room: one level is all it may go up
            assert node.level <= 1, f"{path}: a relative import from another room hides the room"
            yield node.lineno, package + (node.module or "")
        if not _for_types_only(node):
            pending.extend(ast.iter_child_nodes(node))


def allowed(target: str, room: str) -> bool:
    """Whether `room` may import `target`, a dotted name below `legorl`."""
    return target.split(".", maxsplit=1)[0] == room or any(
        target == may or target.startswith(may + ".") for may in MAY_IMPORT[room]
    )


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 20
    assert any(room_of(path) == "trial" for path in FILES)


def test_rooms_import_downwards_only() -> None:
    wrong = []
    for path in FILES:
        room = room_of(path)
        if room not in MAY_IMPORT or path.stem in COMMANDS:
            continue
        for line, name in imports(path):
            if name.startswith("legorl.") and not allowed(name.removeprefix("legorl."), room):
                wrong.append(f"{name_of(path)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_libraries_stay_in_their_rooms(library: str) -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in FILES
        for line, name in imports(path)
        if name.split(".")[0] == library and not name_of(path).startswith(ONLY_IN[library])
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_a_room_above_the_trainer() -> None:
    """The command line, the user interface and the launchers are leaves."""
    leaves = ("legorl.cli", "legorl.ui", "legorl.launchers")
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in FILES
        if room_of(path) not in {"cli", "ui", "launchers"} and path.stem not in COMMANDS
        for line, name in imports(path)
        if name.startswith(leaves)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_environment_is_read_by_the_command_line_only() -> None:
    wrong = []
    for path in FILES:
        if name_of(path).startswith(MAY_READ_ENVIRONMENT):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in _ENVIRONMENT:
                wrong.append(f"{name_of(path)}:{node.lineno} reads the environment")
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                wrong += [
                    f"{name_of(path)}:{node.lineno} imports os.{alias.name}"
                    for alias in node.names
                    if alias.name in _ENVIRONMENT
                ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_says_its_purpose_and_stays_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 330, "a file of more than about 300 lines does more than one thing"
    if text.strip():
        docstring = ast.get_docstring(ast.parse(text))
        assert docstring, "no docstring"
        assert len(docstring) > 20, "the docstring does not say what the file is for"

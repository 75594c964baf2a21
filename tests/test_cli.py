"""The command line: quick help, one paragraph per mistake, exit codes, and `train` up to the launcher."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from legorl import __version__, cli
from legorl.config.rundir import list_runs, read_info
from legorl.errors import SandboxStartError, UserError


def legorl(
    *argv: str, cwd: Path | None = None, before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the program in a process of its own; `before` is Python that runs first."""
    code = f"import sys\n{before}\nfrom legorl.cli import main\nsys.exit(main())"
    root = Path(__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(root)} | environment,
        check=False,
    )


def test_version_and_help() -> None:
    assert legorl("--version").stdout == f"legorl {__version__}\n"
    done = legorl("--help")
    assert done.returncode == 0
    assert all(f"    {name} " in done.stdout for name in cli.COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    heavy = "hydra omegaconf mlflow torch verl vllm ray numpy rich"
    check = f"""
import atexit
atexit.register(lambda: print("heavy:", [name for name in "{heavy}".split() if name in sys.modules]))
"""
    assert legorl("--help", before=check).stdout.endswith("heavy: []\n")
    assert legorl("train", "--help", before=check).stdout.endswith("heavy: []\n")


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_listed_command_has_help(name: str) -> None:
    done = legorl(name, "--help")
    assert done.returncode == 0 and f"legorl {name}" in done.stdout


def test_an_unknown_command_lists_the_known() -> None:
    done = legorl("trian")
    assert done.returncode == 2 and "invalid choice: 'trian'" in done.stderr and "'train'" in done.stderr


def test_a_users_mistake_is_one_paragraph(tmp_path: Path) -> None:
    done = legorl("train", "harness.turn_limt=3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("legorl: There is no configuration key 'harness.turn_limt'.")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = legorl("show", "nope", cwd=tmp_path)
    assert done.returncode == 2 and "There are no runs in runs" in done.stderr


def test_cfg_prints_the_tree_with_overrides_on_both_sides_of_options(tmp_path: Path) -> None:
    done = legorl("train", "seed=5", "--cfg", "run.steps=3", cwd=tmp_path)
    assert done.returncode == 0 and "\nseed: 5\n" in done.stdout and "\n  steps: 3\n" in done.stdout
    assert legorl("train", "--cgf", "seed=5").returncode == 2


class FakeLauncher(ModuleType):
    """Takes the place of a launcher module; notes the runs it was given."""

    def __init__(self) -> None:
        super().__init__("legorl.launchers.fake")
        self.runs: list[Path] = []
        self.codes = [0]

    def check_host(self) -> None:
        pass

    def launch(self, run_dir: Path) -> int:
        self.runs.append(run_dir)
        return self.codes[min(len(self.runs), len(self.codes)) - 1]


class FakePrepare:
    """Takes the place of the preparation; `act` may raise."""

    def __init__(self) -> None:
        self.act: Callable[[], None] = lambda: None

    def prepare(self, config: object, progress: Callable[[str], None]) -> None:
        progress("building the pool")
        self.act()


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeLauncher, FakePrepare]:
    """Everything around `train` but the job and its preparation is real."""
    launcher, prepare = FakeLauncher(), FakePrepare()
    monkeypatch.setitem(sys.modules, launcher.__name__, launcher)
    monkeypatch.setattr("legorl.launchers.commands._prepare", lambda config: prepare.prepare(config, print))
    monkeypatch.chdir(tmp_path)
    return launcher, prepare


TRAIN = ("train", "launcher.name=fake", "experiment=smoke")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("no such thing"), 2, "legorl: no such thing\n"),
        (SandboxStartError("bwrap died"), 3, "legorl: bwrap died [sandbox_start]\n"),
        (KeyboardInterrupt(), 130, "legorl: interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 2, "legorl: The disk is full (runs/x)."),
        (
            PermissionError(errno.EACCES, "Permission denied", "runs/x"),
            2,
            "legorl: runs/x: Permission denied.",
        ),
        (OSError(errno.EMFILE, "Too many open files"), 3, "legorl: The system refused something:"),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main([]) == code
    assert capsys.readouterr().err.startswith(text)


def test_a_loop_of_links_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert cli.main(["harness", "list", "--cache", str(tmp_path / "loop")]) == 2
    assert f"Symlink loop from '{tmp_path}/loop'" in capsys.readouterr().err


def test_a_fault_of_our_own_says_so_after_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise KeyError("surprise")

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main([]) == 3
    told = capsys.readouterr().err
    assert "Traceback" in told and told.endswith("own (KeyError); please report the above.\n")


@pytest.mark.parametrize("key", ["runs", "cache", "pools"])
@pytest.mark.parametrize("value", ["file", "file/below", "loop", "/proc/nowhere", "n" * 300])
def test_a_path_that_is_no_directory_is_named(
    fakes: tuple[FakeLauncher, FakePrepare], capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    Path("file").touch()
    Path("loop").symlink_to("loop")
    assert cli.main([*TRAIN, f"paths.{key}={value}"]) == 2
    assert f"paths.{key}={value} is no directory to work in" in capsys.readouterr().err
    assert not list_runs(Path("runs"))


@pytest.mark.parametrize("name", ["nope", "commands"])
def test_what_is_no_launcher_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", f"launcher.name={name}"]) == 2
    assert f"launcher.name={name}: " in capsys.readouterr().err


@pytest.mark.integration
def test_train_makes_a_run_and_tells_where_to_look(
    fakes: tuple[FakeLauncher, FakePrepare], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*TRAIN, "seed=7"]) == 0
    (run_dir,) = fakes[0].runs
    assert run_dir.resolve().parent == tmp_path / "runs"
    info = read_info(run_dir)
    assert info.overrides == ["launcher.name=fake", "experiment=smoke", "seed=7"] and info.steps == 2
    assert (
        info.choices["experiment"] == "smoke" and len(info.mlflow_run) == 32 and len(info.config_hash) == 16
    )
    assert info.versions["hydra-core"] == "1.3.8" and info.sweep == ""
    assert "seed: 7" in (run_dir / "config.yaml").read_text()
    out = capsys.readouterr().out
    assert "building the pool" in out and f"legorl show {info.id}" in out
    assert "mlflow ui --backend-store-uri sqlite:///runs/mlflow.db" in out


@pytest.mark.integration
def test_a_sweep_runs_all_and_reports_the_first_failure(fakes: tuple[FakeLauncher, FakePrepare]) -> None:
    launcher, _ = fakes
    launcher.codes = [0, 1, 0]
    assert cli.main([*TRAIN, "-m", "algo=gspo,grpo", "seed=1,2"]) == 1
    infos = [read_info(run_dir) for run_dir in launcher.runs]
    assert len({info.id for info in infos}) == 4 and len({info.sweep for info in infos}) == 1
    assert [info.choices["algo"] for info in infos] == ["gspo", "gspo", "grpo", "grpo"]


def test_a_sweep_with_one_bad_job_starts_none(
    fakes: tuple[FakeLauncher, FakePrepare], tmp_path: Path
) -> None:
    assert cli.main([*TRAIN, "-m", "run.steps=1,0"]) == 2
    assert fakes[0].runs == [] and not (tmp_path / "runs").exists()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("error", "code", "state"),
    [(KeyboardInterrupt(), 130, "killed"), (UserError("no network"), 2, "failed")],
)
def test_a_failed_preparation_ends_the_run(
    fakes: tuple[FakeLauncher, FakePrepare], error: BaseException, code: int, state: str
) -> None:
    def fail() -> None:
        raise error

    fakes[1].act = fail
    assert cli.main(list(TRAIN)) == code
    (run_dir,) = list_runs(Path("runs"))
    info = read_info(run_dir)
    assert info.state == state and info.reason.startswith("while preparing: ") and fakes[0].runs == []
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent.resolve()}/mlflow.db")
    assert client.get_run(info.mlflow_run).info.status == state.upper()


@pytest.mark.integration
@pytest.mark.parametrize("kilobytes", [8, 64])
def test_a_full_disk_is_one_message(tmp_path: Path, kilobytes: int) -> None:
    """In a file system of its own: without room for the run, and with room for the run but not for MLflow."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size={kilobytes}k full {disk} && cd {disk} && exec "$@"'
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    done = subprocess.run(
        ["unshare", *user, "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "legorl.cli", "train"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "The disk is full" in done.stderr and "Traceback" not in done.stderr


def test_status_json_without_runs(tmp_path: Path) -> None:
    done = legorl("status", "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout) == []


def test_a_terminal_without_our_signs_loses_signs_only(tmp_path: Path) -> None:
    done = legorl("train", 'run.name="→"', "--cfg", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "\\u2192" in done.stdout, done.stderr

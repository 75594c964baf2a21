"""What the adapters make of an instruction, of an end, and of a request; no program is started."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from legorl.config.compose import compose
from legorl.config.schema import HarnessConfig
from legorl.errors import HarnessError, TransferError, UserError
from legorl.harness.base import Harness, HarnessLimits, ThreadKind
from legorl.harness.registry import HARNESSES, get_harness
from legorl.sandbox.base import ExecResult, Sandbox
from legorl.trial.termination import TERMINATIONS
from tests.harness.page import use_example

LIMITS = HarnessLimits(turns=6, context_tokens=2048, reply_tokens=96, command_timeout_s=20)
URL = "http://127.0.0.1:8377/t/trial-1"


@dataclass
class Files:
    """As much of a sandbox as `outcome` uses."""

    files: dict[str, bytes]

    async def get(self, path: str) -> bytes:
        if path not in self.files:
            raise TransferError(f"{path} does not exist")
        return self.files[path]


def sandbox(files: dict[str, bytes] | None = None) -> Sandbox:
    return cast(Sandbox, Files(files or {}))


def ended(stdout: str = "", code: int = 0, *, timed_out: bool = False) -> ExecResult:
    return ExecResult(code, stdout.encode(), b"the last words", 1.0, timed_out)


def adapter(name: str, profile: str = "lean") -> Harness:
    return get_harness(HarnessConfig(name=name, profile=profile))


def test_unknown_names_and_profiles_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="Did you mean claude_code"):
        adapter("claude-code")
    with pytest.raises(UserError, match=r"harness\.profile is 'fat'.*lean, stock"):
        adapter("opencode", "fat")


@pytest.mark.parametrize("profile", ["lean", "stock"])
@pytest.mark.parametrize("name", sorted(HARNESSES))
def test_a_launch_names_the_proxy_and_no_other_address(name: str, profile: str) -> None:
    launch = adapter(name, profile).command("Fix it.\n", URL, "token-1", LIMITS)
    text = json.dumps([launch.argv, dict(launch.env), [data.decode() for data in launch.files.values()]])
    assert URL in text
    assert "token-1" in text
    assert "token-1" not in " ".join(launch.argv), "a command line is readable by every process"
    assert text.count("http") == text.count(URL)


@pytest.mark.parametrize("name", sorted(HARNESSES))
async def test_a_deadline_is_an_end_of_its_own(name: str) -> None:
    outcome = await adapter(name).outcome(sandbox(), ended(code=124, timed_out=True))
    assert outcome.termination == "agent_deadline"


@pytest.mark.parametrize("name", sorted(HARNESSES))
async def test_an_unexplained_end_is_the_harness_s_failure(name: str) -> None:
    with pytest.raises(HarnessError, match=r"(?s)exit code 139.*the last words") as raised:
        await adapter(name).outcome(sandbox(), ended("not an event\n", 139))
    assert name in str(raised.value)


class TestMini:
    """mini-swe-agent."""

    def config(self, profile: str, limits: HarnessLimits = LIMITS) -> dict[str, Any]:
        launch = adapter("mini_swe_agent", profile).command("Fix it.\n", URL, "token-1", limits)
        (data,) = launch.files.values()
        config: dict[str, Any] = json.loads(data)
        return config

    def test_lean_templates_are_exact(self) -> None:
        agent = self.config("lean")["agent"]
        assert agent["system_template"] == "You are a helpful assistant that can interact with a computer."
        assert agent["instance_template"] == "Please solve this issue: {{task}}"
        assert agent["step_limit"] == 6
        assert self.config("lean")["model"]["format_error_template"] == "error: no tool call"

    def test_stock_keeps_the_shipped_templates(self) -> None:
        launch = adapter("mini_swe_agent", "stock").command("Fix it.", URL, "t", LIMITS)
        assert launch.argv[-2] == "mini.yaml"
        assert "instance_template" not in self.config("stock")["agent"]

    @pytest.mark.parametrize(
        ("output", "shown"),
        [
            ("2 failed\n", "2 failed"),
            ("", "(no output)"),
            ("  indented\n\n", "  indented"),
            ("x" * 1500, "x" * 512 + "\n[...]\n" + "x" * 512),
        ],
    )
    def test_lean_observations(self, output: str, shown: str) -> None:
        jinja2 = pytest.importorskip("jinja2")
        template = jinja2.Template(self.config("lean")["model"]["observation_template"])
        assert template.render(output={"output": output, "exception_info": ""}) == shown

    @pytest.mark.parametrize(
        ("status", "content", "termination"),
        [
            ("Submitted", "", "submitted"),
            ("LimitsExceeded", "LimitsExceeded", "turn_limit"),
            ("RepeatedFormatError", "RepeatedFormatError", "format_errors"),
            ("RequestRefusedError", "context_length_exceeded: too long", "context_overflow"),
        ],
    )
    async def test_outcomes(self, status: str, content: str, termination: str) -> None:
        trajectory = {"info": {"exit_status": status}, "messages": [{"role": "exit", "content": content}]}
        files = {"/tmp/legorl/trajectory.json": json.dumps(trajectory).encode()}
        outcome = await adapter("mini_swe_agent").outcome(sandbox(files), ended())
        assert outcome.termination == termination
        assert outcome.termination in TERMINATIONS

    async def test_a_dead_engine_is_not_the_policy_s_end(self) -> None:
        end = {"role": "exit", "content": "engine_failure: the engine died"}
        trajectory = {"info": {"exit_status": "RequestRefusedError"}, "messages": [end]}
        files = {"/tmp/legorl/trajectory.json": json.dumps(trajectory).encode()}
        with pytest.raises(HarnessError, match="the engine died"):
            await adapter("mini_swe_agent").outcome(sandbox(files), ended(code=1))


class TestClaudeCode:
    """Claude Code."""

    @pytest.mark.parametrize(
        ("result", "termination"),
        [
            ({"subtype": "success", "is_error": False, "result": "Done."}, "submitted"),
            ({"subtype": "error_max_turns", "is_error": True}, "turn_limit"),
            (
                {
                    "subtype": "success",
                    "is_error": True,
                    "result": "API Error: Claude's response exceeded the 96 output token maximum.",
                },
                "format_errors",
            ),
            ({"subtype": "success", "is_error": True, "result": "Prompt is too long"}, "context_overflow"),
        ],
    )
    async def test_outcomes(self, result: dict[str, Any], termination: str) -> None:
        lines = [{"type": "assistant"}, {"type": "result", **result}]
        stdout = "\n".join(json.dumps(line) for line in lines) + "\n"
        outcome = await adapter("claude_code").outcome(sandbox(), ended(stdout))
        assert outcome.termination == termination

    async def test_an_api_error_is_not_a_submission(self) -> None:
        line = {"type": "result", "subtype": "success", "is_error": True, "result": "API Error: 500 dead"}
        with pytest.raises(HarnessError, match="API Error: 500 dead"):
            await adapter("claude_code").outcome(sandbox(), ended(json.dumps(line), 1))

    def test_stock_is_as_shipped(self) -> None:
        lean = adapter("claude_code").command("Fix it.", URL, "t", LIMITS)
        stock = adapter("claude_code", "stock").command("Fix it.", URL, "t", LIMITS)
        assert "--bare" in lean.argv
        assert "--bare" not in stock.argv
        assert "DISABLE_COMPACT" not in stock.env


class TestOpenCode:
    """OpenCode."""

    @pytest.mark.parametrize(
        ("event", "code", "termination"),
        [
            ({"type": "step_finish", "part": {"reason": "stop"}}, 0, "submitted"),
            ({"type": "error", "error": {"name": "ContextOverflowError", "data": {
                "message": "m", "responseBody": "context_length_exceeded"}}}, 1, "context_overflow"),
        ],
    )  # fmt: skip
    async def test_outcomes(self, event: dict[str, Any], code: int, termination: str) -> None:
        outcome = await adapter("opencode").outcome(sandbox(), ended(json.dumps(event) + "\n", code))
        assert outcome.termination == termination

    async def test_another_error_is_not_a_submission(self) -> None:
        events = [{"type": "step_finish"}, {"type": "error", "error": {"data": {"message": "engine died"}}}]
        stdout = "\n".join(json.dumps(event) for event in events)
        with pytest.raises(HarnessError, match="engine died"):
            await adapter("opencode").outcome(sandbox(), ended(stdout, 1))

    def test_lean_has_one_tool_and_asks_for_no_title(self) -> None:
        launch = adapter("opencode").command("Fix it.", URL, "t", LIMITS)
        (data,) = launch.files.values()
        assert json.loads(data)["permission"] == {"*": "deny", "bash": "allow"}
        assert "--title" in launch.argv


class TestOpenHands:
    """OpenHands SDK."""

    @pytest.mark.parametrize(
        ("status", "error", "termination"),
        [
            ("finished", "", "submitted"),
            ("stuck", "", "format_errors"),
            ("error", "MaxIterationsReached: Agent reached maximum iterations limit (6).", "turn_limit"),
            ("error", "LLMContextWindowExceedError: ... context_length_exceeded ...", "context_overflow"),
        ],
    )
    async def test_outcomes(self, status: str, error: str, termination: str) -> None:
        end = json.dumps({"status": status, "error": error}).encode()
        files = {"/tmp/legorl/openhands.result.json": end}
        outcome = await adapter("openhands").outcome(sandbox(files), ended(code=1 if error else 0))
        assert outcome.termination == termination
        assert outcome.termination in TERMINATIONS

    async def test_a_dead_engine_is_not_the_policy_s_end(self) -> None:
        end = json.dumps(
            {"status": "error", "error": "LLMServiceUnavailableError: the engine failed"}
        ).encode()
        with pytest.raises(HarnessError, match="the engine failed"):
            await adapter("openhands").outcome(
                sandbox({"/tmp/legorl/openhands.result.json": end}), ended(code=1)
            )


class TestCodex:
    """Codex."""

    @pytest.mark.parametrize(
        ("events", "code", "termination"),
        [
            ([{"type": "turn.started"}, {"type": "turn.completed", "usage": {}}], 0, "submitted"),
            (
                [{"type": "error", "message": "retrying"}, {"type": "turn.failed", "error": {
                    "message": "Codex ran out of room in the model's context window. Start a new thread"}}],
                1,
                "context_overflow",
            ),
        ],
    )  # fmt: skip
    async def test_outcomes(self, events: list[dict[str, Any]], code: int, termination: str) -> None:
        stdout = "\n".join(json.dumps(event) for event in events)
        outcome = await adapter("codex").outcome(sandbox(), ended(stdout, code))
        assert outcome.termination == termination

    async def test_a_failed_turn_is_not_a_submission(self) -> None:
        event = {"type": "turn.failed", "error": {"message": "the engine failed"}}
        with pytest.raises(HarnessError, match="the engine failed"):
            await adapter("codex").outcome(sandbox(), ended(json.dumps(event), 1))

    @pytest.mark.parametrize("profile", ["lean", "stock"])
    def test_the_configuration_is_toml(self, profile: str) -> None:
        launch = adapter("codex", profile).command("Fix it.", URL, "t", LIMITS)
        config = tomllib.loads(launch.files["/home/agent/.codex/config.toml"].decode())
        assert config["model_providers"]["legorl"]["base_url"] == f"{URL}/v1"
        assert config["model_context_window"] == LIMITS.context_tokens
        assert ("features" in config) == (profile == "lean")


class TestQwenCode:
    """Qwen Code."""

    @pytest.mark.parametrize(
        ("end", "code", "termination"),
        [
            ({"subtype": "success", "is_error": False}, 0, "submitted"),
            ({}, 53, "turn_limit"),
            (
                {"subtype": "error_during_execution", "is_error": True, "error": {
                    "message": "400 prompt is too long"}},
                1,
                "context_overflow",
            ),
        ],
    )  # fmt: skip
    async def test_outcomes(self, end: dict[str, Any], code: int, termination: str) -> None:
        stdout = json.dumps({"type": "result", **end})
        outcome = await adapter("qwen_code").outcome(sandbox(), ended(stdout, code))
        assert outcome.termination == termination

    async def test_an_api_error_is_not_a_submission(self) -> None:
        end = {"type": "result", "subtype": "error_during_execution", "is_error": True, "error": "500 dead"}
        with pytest.raises(HarnessError, match="500 dead"):
            await adapter("qwen_code").outcome(sandbox(), ended(json.dumps(end), 1))


class TestOwnHarness:
    """One that is not packaged."""

    def test_by_its_yaml(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory = use_example(tmp_path, monkeypatch)
        harness = get_harness(compose(["harness=tiny"], [directory]).harness)
        assert (harness.name, harness.version) == ("tiny", "1")
        assert harness.speaker({}, {"messages": []}).kind is ThreadKind.MAIN

    @pytest.mark.parametrize("target", ["nowhere:Tiny", "legorl.errors:Nothing", "legorl.errors", ":", "x:"])
    def test_what_cannot_be_imported(self, target: str) -> None:
        with pytest.raises(UserError, match=r"harness\.target=.*package\.module:Class"):
            get_harness(HarnessConfig(name="tiny", target=target))

    def test_what_is_no_harness(self) -> None:
        with pytest.raises(UserError, match="is not a subclass"):
            get_harness(HarnessConfig(name="tiny", target="legorl.errors:UserError"))

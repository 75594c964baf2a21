"""Run an OpenHands SDK agent on a configuration file; the SDK is a library, and this is the program.

Usage: openhands_runner.py LIBRARY CONFIG. Agent, tools, prompts, loop and condenser are the SDK's own.
The file `result` of the configuration says how the conversation ended; the exit code is 1 when it broke.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run(specs: Sequence[str]) -> int:
    """Hold the conversation of the one configuration file and write down its end.

    It has `llm` (fields of the SDK's `LLM`), `task`, `turns`, `lean` (system prompt of the small profile, or
    null for the SDK's default agent with subagents), `workspace`, `persistence`, `result`.
    """
    from openhands.sdk import LLM, Conversation
    from openhands.sdk.event.conversation_error import ConversationErrorEvent

    config = json.loads(Path(specs[0]).read_text())
    llm = LLM(**config["llm"])
    agent = _lean(llm, config["lean"]) if config["lean"] else _stock(llm)
    conversation = Conversation(
        agent=agent,
        workspace=config["workspace"],
        persistence_dir=config["persistence"],
        max_iteration_per_run=config["turns"],
        visualizer=None,
    )
    code, error = 0, ""
    try:
        conversation.send_message(config["task"])
        conversation.run()
    except Exception as failure:
        traceback.print_exc()
        code, error = 1, f"{type(failure).__name__}: {failure}"
    for event in conversation.state.events:
        if isinstance(event, ConversationErrorEvent):
            error = f"{event.code}: {event.detail}"
    end = {"status": conversation.state.execution_status.value, "error": error}
    Path(config["result"]).write_text(json.dumps(end))
    conversation.close()
    return code


def warm_up() -> None:
    """Import what an agent imports."""
    import openhands.sdk.context.condenser
    import openhands.sdk.event.conversation_error
    import openhands.tools.file_editor
    import openhands.tools.preset.default
    import openhands.tools.task
    import openhands.tools.task_tracker
    import openhands.tools.terminal
    import openhands.tools.terminal.impl  # noqa: F401


def _lean(llm: Any, prompt: str) -> Any:
    """One terminal, a short system prompt, no condenser."""
    from openhands.sdk import Agent, Tool

    _register_terminal()
    return Agent(llm=llm, tools=[Tool(name="terminal")], system_prompt=prompt, include_default_tools=[])


def _stock(llm: Any) -> Any:
    """The SDK's default command-line agent, with its own subagents."""
    from openhands.sdk import Agent
    from openhands.tools.preset.default import (
        get_default_condenser,
        get_default_tools,
        register_builtins_agents,
    )

    tools = get_default_tools(enable_browser=False, enable_sub_agents=True)
    _register_terminal()
    register_builtins_agents(enable_browser=False)
    condenser = get_default_condenser(llm.model_copy(update={"usage_id": "condenser"}))
    return Agent(llm=llm, tools=tools, system_prompt_kwargs={"cli_mode": True}, condenser=condenser)


def _register_terminal() -> None:
    """The SDK's terminal on its own pseudo-terminal, where it would else depend on a tmux of the machine."""
    from openhands.sdk.tool import register_tool
    from openhands.tools.terminal import TerminalTool

    class SubprocessTerminalTool(TerminalTool):  # type: ignore[misc]  # untyped package
        name = TerminalTool.name

        @classmethod
        def create(cls, *args: Any, **kwargs: Any) -> Any:
            return super().create(*args, **{"terminal_type": "subprocess", **kwargs})

    register_tool(TerminalTool.name, SubprocessTerminalTool)


if __name__ == "__main__":
    sys.path[:0] = [sys.argv[1]]
    sys.exit(run(sys.argv[2:]))

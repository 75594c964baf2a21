"""Run mini-swe-agent on configuration files: what its own `mini` command does, without the terminal.

Usage: mini_runner.py LIBRARY CONFIG... ; later configurations win. The agent's trajectory file says how it
ended; the exit code is 1 when it ended by an exception.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence


def run(specs: Sequence[str]) -> int:
    """Build model, environment and agent from the merged configurations and run the task in them."""
    from minisweagent.agents import get_agent
    from minisweagent.config import get_config_from_spec
    from minisweagent.environments import get_environment
    from minisweagent.models import get_model
    from minisweagent.utils.serialize import recursive_merge

    config = recursive_merge(*(get_config_from_spec(spec) for spec in specs))
    model = get_model(config=config["model"])
    environment = get_environment(config["environment"], default_type="local")
    agent = get_agent(model, environment, config["agent"], default_type="default")
    try:
        agent.run(config["run"]["task"])
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def warm_up() -> None:
    """Import what an agent imports, and do once what is slow the first time."""
    import encodings.idna  # noqa: F401

    import minisweagent.agents.default
    import minisweagent.config
    import minisweagent.environments.local  # noqa: F401
    import requests
    from jinja2 import StrictUndefined, Template

    importlib.import_module("mini_model")  # as configurations name it
    Template("{% if a %}{{ a }}{% endif %}", undefined=StrictUndefined).render(a="")
    requests.Session().prepare_request(requests.Request("POST", "http://127.0.0.1/", json={}))


if __name__ == "__main__":
    sys.path[:0] = [__file__.rpartition("/")[0], sys.argv[1]]
    sys.exit(run(sys.argv[2:]))

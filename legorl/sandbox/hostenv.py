"""This process's environment, for ablations: what a sandbox gets while the rule `no_credentials` is off."""

from __future__ import annotations

import os


def host_environment() -> dict[str, str]:
    """A copy, without what this machine's loader is told: its libraries are not in there."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LD_")}

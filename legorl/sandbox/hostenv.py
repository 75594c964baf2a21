"""This process's environment, for ablations: what a sandbox gets while the rule `no_credentials` is off."""

from __future__ import annotations

import os


def host_environment() -> dict[str, str]:
    """A copy."""
    return dict(os.environ)

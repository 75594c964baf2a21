"""verl asks for its platform when it is imported: these tests run on the cpu, as a laptop run does."""

from __future__ import annotations

import importlib.util

from legorl.config.compose import compose
from legorl.trainer import environment

if importlib.util.find_spec("verl") is not None:
    environment.set_up(compose([]))

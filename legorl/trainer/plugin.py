"""What verl imports in every process it starts (`VERL_USE_EXTERNAL_MODULES`): our registrations."""

from __future__ import annotations

import os

from legorl.trainer import patches

# The process environment is how verl itself hands this choice to its workers; the job sets both
# variables (`legorl.trainer.environment`), nothing else reads them.
_CPU = os.environ.get("VERL_PLATFORM", "").lower() == "cpu"

if _CPU:
    import legorl.trainer.platform  # noqa: F401 - registers itself

patches.install(cpu=_CPU, fork_engine_core=os.environ.get("LEGORL_FORK_ENGINE_CORE") == "1")

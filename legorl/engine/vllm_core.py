"""What runs in vLLM's core process: one device, and the same end as the process that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from legorl.sandbox.linux import set_parent_death_signal


class CoreExecutor(UniProcExecutor):  # type: ignore[misc]
    """vLLM's executor for one device; loaded by class path, in the core, before the model is."""

    def _init_executor(self) -> None:
        set_parent_death_signal(signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            os._exit(1)  # it died before the kernel knew that we care
        super()._init_executor()

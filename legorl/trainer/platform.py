"""verl's platform "cpu": torch.cpu behind the interface that verl expects of an accelerator.

Registered in verl's own `PlatformRegistry`; chosen by `VERL_PLATFORM=cpu` only, never by detection.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

_DEVICES = 8
"""Virtual devices a process may address; Ray's own resource count bounds what is used."""


class _CpuDevice(types.ModuleType):
    """`torch.cpu` plus the functions of `torch.cuda` that verl calls, as no-ops."""

    def __init__(self) -> None:
        super().__init__("legorl_cpu_device")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        raise AttributeError(f"the cpu platform has no {name}")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return _DEVICES

    def set_device(self, *_: object) -> None: ...

    def synchronize(self, *_: object) -> None: ...

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...

    def reset_peak_memory_stats(self, *_: object) -> None: ...

    def memory_allocated(self, *_: object) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, *_: object) -> str:
        return "cpu"

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, *_: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: object) -> None:
        torch.set_rng_state(state)


_device = _CpuDevice()


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """See the module."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return _device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return _DEVICES

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        # verl's ResourcePoolManager counts only GPU and NPU: a CPU run has virtual GPUs.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

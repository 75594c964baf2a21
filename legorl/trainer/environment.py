"""The process environment of a job: what the libraries below read from it, and nothing of ours.

Called once, before torch, ray, verl or vllm are imported.
"""

from __future__ import annotations

import os

from legorl.config.schema import Config


def set_up(config: Config) -> None:
    """Set the variables; a value that somebody exported stays."""
    cpu = config.backend.device == "cpu"
    variables = {
        "VERL_USE_EXTERNAL_MODULES": "legorl.trainer.plugin",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TRANSFORMERS_VERBOSITY": "error",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    if cpu:
        variables |= {
            "VERL_PLATFORM": "cpu",
            "OMP_NUM_THREADS": str(config.backend.threads),
            # A thread that spins for its partner starves it when the sandboxes want the core.
            "OMP_WAIT_POLICY": "PASSIVE",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(config.engine.kv_cache_gb),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # vLLM's first log-prob call would otherwise compile a helper with g++ for ten seconds.
            "TORCHDYNAMO_DISABLE": "1",
            "LEGORL_FORK_ENGINE_CORE": "1" if config.launcher.warm_workers else "0",
        }
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    for name, value in variables.items():
        os.environ.setdefault(name, value)

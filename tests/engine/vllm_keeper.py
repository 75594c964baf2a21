"""Holds vLLM in process, prints the ids of the processes below it, and waits. Its argument is the model."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from legorl.engine.vllm import VllmEngine


def main() -> None:
    """Until standard input ends."""
    engine = VllmEngine.start(
        Path(sys.argv[1]),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=2,
        kv_cache_gb=0.1,
        timeout_s=10,
    )
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    sys.stdin.read()
    engine.llm.shutdown(timeout=5)


if __name__ == "__main__":  # the core imports this module again
    main()

"""tmp"""
from typing import Any
async def open_runner(config: Any, engine: Any, run_dir: Any) -> Any: raise NotImplementedError

"""verl's replay buffers with a short poll: a laptop step lasts seconds, verl's own poll two.

verl's plug-in point: `trainer.v1.sampler.custom_sampler`.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

_POLL_S = 0.05


class FastReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    """For the synchronous trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"poll_interval": _POLL_S, **kwargs})


class FastReplayBufferAsync(ReplayBufferAsync):  # type: ignore[misc]
    """For the asynchronous trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"poll_interval": _POLL_S, **kwargs})

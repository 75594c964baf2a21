"""Muon for matrices beside AdamW for the rest: a warm start converges in a few hundred steps on a CPU.

torch's own Muon takes no stacked matrices (the experts are one tensor) and iterates in bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic Newton-Schulz iteration of Muon."""
MOMENTUM = 0.95
WARMUP_STEPS = 20
FLOOR = 0.1
"""Learning rate at the end of the cosine, as a share of the peak."""


class MuonAdamW:
    """Muon for a model's matrices, AdamW for its embeddings, output layer, routers and norms.

    One linear warm-up and cosine decay governs both.
    """

    def __init__(self, model: Any, matrix_lr: float, lr: float, steps: int) -> None:
        named = list(model.named_parameters())
        self.matrices = [param for name, param in named if _is_matrix(name, param)]
        self.momenta = [torch.zeros_like(param) for param in self.matrices]
        others = [param for name, param in named if not _is_matrix(name, param)]
        self.adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.matrix_lr, self.lr, self.steps, self.done = matrix_lr, lr, steps, 0

    def step(self) -> None:
        """One update with the present gradients, which it clears."""
        cosine = 0.5 * (1 + math.cos(math.pi * self.done / self.steps))
        factor = min(1.0, (self.done + 1) / WARMUP_STEPS) * (FLOOR + (1 - FLOOR) * cosine)
        self.done += 1
        for group in self.adamw.param_groups:
            group["lr"] = self.lr * factor
        self.adamw.step()
        with torch.no_grad():
            for param, momentum in zip(self.matrices, self.momenta, strict=True):
                momentum.lerp_(param.grad, 1 - MOMENTUM)
                update = orthogonalize(param.grad.lerp(momentum, MOMENTUM))
                # The factor gives the update the root mean square of an AdamW update.
                param.add_(update, alpha=-self.matrix_lr * factor * 0.2 * math.sqrt(max(param.shape[-2:])))
        for param in (*self.matrices, *self.adamw.param_groups[0]["params"]):
            param.grad = None


def orthogonalize(matrix: Any, iterations: int = 5) -> Any:
    """Roughly the nearest orthogonal matrix (singular values about 1), over the last two dimensions."""
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(iterations):
        y = x @ x.mT
        x = _A * x + (_B * y + _C * y @ y) @ x
    return x.mT if tall else x


def _is_matrix(name: str, param: Any) -> bool:
    excluded = ("embed_tokens", "lm_head", "mlp.gate.weight")
    return param.ndim >= 2 and not any(part in name for part in excluded)

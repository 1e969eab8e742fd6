"""The optimiser and its learning rate, a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tensor_memory_lab.run_config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of optimiser step number `step`, counted from 0, of a budget of `steps`.

    The warm-up rises linearly and reaches the peak at its last step. The cosine then falls from
    the peak to zero at the end of the budget.

    >>> config = OptimizerConfig(lr=1.0, warmup=2, schedule="cosine")
    >>> [round(learning_rate(config, step, 6), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    >>> learning_rate(OptimizerConfig(lr=1.0, schedule="constant"), 5, 6)
    1.0
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(steps - config.warmup, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, device: torch.device
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: parameters of two or more dimensions.

    Embeddings and convolutions count as matrices; biases, norms and gates do not decay. On a GPU
    the rate is a tensor and the steps are counted there, so that a CUDA graph can hold the update;
    eager runs use the same kernels, so that both give the same numbers.
    """
    parameters = [p for _, p in trained(model)]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    cuda = device.type == "cuda"
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=torch.tensor(config.lr, device=device) if cuda else config.lr,
        betas=config.betas,
        fused=device.type in ("cpu", "cuda"),
        capturable=cuda,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group this rate, without waiting for the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that learn, each once, by its first name."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)

"""What a memory learns: its parameters, and one function for each equation they stand in.

Their names are fixed, so that weights can be exchanged.

Letters: B batch, K tokens per chunk, S chunks, d width, C channels, n axes, R reads and M writes
per chunk, Q reads of a chunk: R, or K·R where every token reads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory.config import MemoryConfig
from tensor_memory.ops import BACKENDS

SIGMA_FLOOR = 1e-4  # keeps the Gaussian from collapsing to a point


class MemoryWeights(nn.Module):
    """The parameters of a memory for tokens of width d; `TensorMemory` is what runs them."""

    def __init__(
        self, dim: int, config: MemoryConfig | None = None, *, zero_init: bool = False
    ) -> None:
        super().__init__()
        config = config or MemoryConfig()
        if not isinstance(config, MemoryConfig):
            raise TypeError(
                f"config: expected a MemoryConfig, got {type(config).__name__}; "
                "MemoryConfig.from_dict() makes one of a dictionary"
            )
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(
                f"dim: expected the tokens' width as an integer, got {dim!r}; "
                "convert it with int(), and pass the config after it"
            )
        if dim < 1:
            raise ValueError(f"dim: expected the tokens' width, at least 1, got {dim}")
        if config.backend not in BACKENDS:
            raise ValueError(
                f"config.backend: expected one of {', '.join(BACKENDS)}, got {config.backend!r}; "
                "leave it out for the fastest that can serve"
            )
        if not isinstance(zero_init, bool):
            raise TypeError(
                f"zero_init: expected True or False, got {zero_init!r}; leave it out for False"
            )
        self.dim, self.config, self.zero_init = dim, config, zero_init
        C, K, n = config.channels, config.chunk_size, config.axes
        R, M = config.read_heads, config.write_heads

        self.write_proj = nn.Linear(K * dim, dim, bias=False)
        if config.share_coordinates:
            self.coordinate = nn.Linear(dim, R * n, bias=False)
        else:
            self.read_coordinate = nn.Linear(dim, R * n, bias=False)
            self.write_coordinate = nn.Linear(dim, M * n, bias=False)
        self.content = nn.Linear(dim, M * C, bias=False)
        if config.write == "gaussian":
            self.spread = nn.Linear(dim, M)
        if config.mixing == "factorized":
            self.taps = nn.Parameter(torch.empty(n, 2 * C, 3))
        self.mix = nn.Linear(2 * C, 4 * C)
        self.output = nn.Linear(R * C, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise everything, as the constructor does."""
        for layer in self.children():
            assert isinstance(layer, nn.Linear)
            layer.reset_parameters()
        C = self.config.channels
        nn.init.xavier_uniform_(self.mix.weight)
        self.mix.weight[:, C:] *= self.config.feedback  # inputs in the order U, h
        for layer in (self.content, self.output):
            layer.weight *= self.config.gain
        self.mix.bias.zero_()  # gates in the order i, f, o, g
        self.mix.bias[:C] = self.config.input_bias
        self.mix.bias[C : 2 * C] = self.config.forget_bias
        if self.config.write == "gaussian":
            self.spread.bias.fill_(self.config.spread_bias)
        if self.config.mixing == "factorized":
            self.taps.copy_(torch.tensor([0.0, 1.0, 0.0]))
        if self.zero_init:
            self.output.weight.zero_()

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.dim}, {self.config}"

    @property
    def read_head(self) -> nn.Linear:
        """W_coord of reads; of writes too where coordinates are shared."""
        return self.coordinate if self.config.share_coordinates else self.read_coordinate

    @property
    def write_head(self) -> nn.Linear:
        """W_coord of writes."""
        return self.coordinate if self.config.share_coordinates else self.write_coordinate

    def _read_at(self, tokens: Tensor) -> Tensor:
        """(B, S, K, d) -> (B, S, Q, n): the chunk's first token asks, or every token does."""
        queries = tokens[:, :, :1] if self.config.reads == "chunk" else tokens
        return self._coordinates(self.read_head, queries).flatten(2, 3)

    def _coordinates(self, head: nn.Linear, source: Tensor) -> Tensor:
        """μ = tanh(W_coord ·): (..., d) -> (..., heads, n), in float32 even under autocast."""
        at = head(source)
        return at.to(_at_least_float32(at)).tanh().unflatten(-1, (-1, self.config.axes))

    def _spread(self, summary: Tensor) -> Tensor:
        """σ = α (softplus(W_σ · + b_σ) + 1e-4): (B, S, d) -> (B, S, M)."""
        raw = self.spread(summary)
        return self.config.sigma_scale * (F.softplus(raw.to(_at_least_float32(raw))) + SIGMA_FLOOR)

    def _readout(self, reads: Tensor) -> tuple[Tensor, int]:
        """m = W_out r, and for how many tokens each: reads (B, S, Q·C) -> (B, S or S·K, d)."""
        K = self.config.chunk_size
        reads = reads.to(self.output.weight.dtype)  # a host in half precision multiplies in it
        if self.config.reads == "token":
            return self.output(reads.unflatten(-1, (K, -1))).flatten(1, 2), 1
        return self.output(reads), K


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)

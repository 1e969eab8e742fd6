"""What the configs of all compared models share, and the sizes at which methods are compared."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensor_memory import MemoryConfig
from tensor_memory_lab.choices import check_choices
from tensor_memory_lab.models.side import memory_bytes, side_parameters


@dataclass(frozen=True)
class TransformerConfig:
    """A Transformer and the memory it may hold."""

    method: str = "base"
    """The compared mechanism."""
    dim: int = 64
    """d, width of the tokens."""
    layers: int = 2
    """Transformer blocks."""
    heads: int = 4
    """Attention heads; a divisor of `dim`."""
    mlp_ratio: float = 4.0
    """Width of the MLP over `dim`."""
    dropout: float = 0.1
    """On what attention, MLP and side path add; in decoders on embeddings too."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """The memory, whose bytes and weights other methods are matched to."""
    memory_layers: tuple[int, ...] | None = None
    """Layers with the memory or what stands in its place, counted from 0; None takes all."""
    gate_init: float = 0.0
    """Initial γ of the memory layers."""

    def __post_init__(self) -> None:
        check_choices(self, "model")
        layers = self.with_memory
        if len(set(layers)) != len(layers) or not set(layers) <= set(range(self.layers)):
            raise ValueError(
                f"model.memory_layers: expected different layers of 0 to {self.layers - 1}, got "
                f"{layers}; choose them with --model.memory-layers"
            )

    @property
    def with_memory(self) -> tuple[int, ...]:
        """Layers that hold the memory, or whose memory others are matched to."""
        return tuple(range(self.layers)) if self.memory_layers is None else self.memory_layers

    @property
    def memory_bytes(self) -> int:
        """Bytes of one row's memory over all layers, which other methods may fill."""
        return memory_bytes(self.memory, len(self.with_memory))

    @property
    def wide_ratio(self) -> float:
        """MLP ratio that adds as many weights as the memory would."""
        extra = side_parameters(self.dim, self.memory, len(self.with_memory))
        return wide_ratio(self.dim, self.layers, self.mlp_ratio, extra)


def wide_ratio(dim: int, layers: int, ratio: float, extra: int) -> float:
    """MLP ratio at which `extra` weights are added, rounded to what products like.

    >>> 384 * wide_ratio(384, 8, 4.0, 2_400_457)  # 1536 wide before
    1928.0
    """
    hidden, per_unit = round(dim * ratio), layers * (2 * dim + 1)
    unit = 8 if 8 * per_unit < extra / 8 else 1  # coarse only where the error stays far below 1 %
    return (hidden + unit * round(extra / per_unit / unit)) / dim

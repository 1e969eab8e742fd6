"""The place scans that are measured: their sizes, inputs, and what judges them.

Letters: B batch, N tokens, H heads, n axes, V voxels, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory import PlaceConfig, place_scan
from tensor_memory_lab.bench.shapes import Scan, ScanInputs, Shape, coordinates


@dataclass(frozen=True)
class PlaceShape(Shape):
    """B rows of N tokens through one place memory.

    >>> PlaceShape(32, 512, PlaceConfig(), torch.bfloat16).label
    'B 32, N 512, H 4, 8x8, C 32, gaussian, linear rule, bfloat16'
    """

    batch: int
    tokens: int
    config: PlaceConfig
    products: torch.dtype

    outputs = ("reads", "state")

    @property
    def grid(self) -> tuple[int, ...]:
        """Voxels along each axis."""
        return self.config.grid

    @property
    def label(self) -> str:
        """One line for tables and error messages."""
        config = self.config
        grid = "x".join(map(str, self.grid))
        return (
            f"B {self.batch}, N {self.tokens}, H {config.heads}, {grid}, C {config.channels}, "
            f"{config.kernel}, {config.rule} rule, {self.dtype_name}"
        )

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        sizes = {"batch": self.batch, "tokens": self.tokens, "products": self.dtype_name}
        return sizes | self.config.to_dict()

    def draw(self, device: torch.device, seed: int) -> ScanInputs:
        """Random inputs of the sizes a fresh memory produces; places are spread over the grid."""
        generator = torch.Generator().manual_seed(seed)
        config, size = self.config, (self.batch, self.tokens, self.config.heads)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        arguments = {"write_at": coordinates(self.grid, size, generator)}
        if not config.share_places:
            arguments["read_at"] = coordinates(self.grid, size, generator)
        arguments |= {
            "content": 0.6 * normal(*size, config.channels),
            "rate": (0.6 * normal(*size)).sigmoid(),
            "log_keep": F.logsigmoid(config.keep_bias + 0.6 * normal(*size)),
        }
        if config.kernel == "gaussian":
            arguments["width"] = 0.5 * (0.1 * normal(config.heads)).exp()
        voxels = (self.batch, config.heads, *self.grid, config.channels)
        arguments["state"] = normal(*voxels)
        moved = {name: tensor.to(device) for name, tensor in arguments.items()}
        grads = [normal(*size, config.channels).to(device), normal(*voxels).to(device)]
        return ScanInputs(moved, grads, shared=("width",))

    def scan(self, backend: str) -> Scan:
        """`place_scan` by one backend."""
        absent = {"read_at": None, "width": None}
        choices = {"rule": self.config.rule, "wrap": self.config.wrap, "backend": backend}
        return lambda **tensors: place_scan(**absent | tensors, **choices)

    def expected(self, inputs: ScanInputs) -> dict[str, Tensor]:
        """The chunked form in float64.

        The tests hold it to the token-by-token reference, which would keep every state.
        """
        exact = inputs.leaves(dtype=torch.float64)
        return exact.with_gradients(self, self.scan("torch")(**exact.arguments))


def addresses(shape: PlaceShape, inputs: ScanInputs) -> Tensor:
    """φ (B, N, H, V) of the write places: what one token leaves that writes 1 to an empty grid."""
    at = inputs.arguments["write_at"].flatten(0, 1)[:, None]  # (B·N, 1, H, n)
    ones = at.new_ones(at.shape[:3])
    given = {
        "write_at": at,
        "content": ones[..., None],
        "rate": ones,
        "log_keep": torch.zeros_like(ones),
        "state": at.new_zeros(at.shape[0], at.shape[2], *shape.grid, 1),
    }
    if "width" in inputs.arguments:
        given["width"] = inputs.arguments["width"]
    _, state = shape.scan("torch")(**given)  # (B·N, H, *grid, 1)
    return state.reshape(shape.batch, shape.tokens, shape.config.heads, shape.voxels)

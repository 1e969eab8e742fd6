"""Plain models of the published shapes, kept lean so that the memory is compared with a fast host.

Fused attention, one matrix product for q, k and v, a loss that never holds the logits of the whole
batch. A memory is put between or after the sublayers by handing over a `MemoryResidual` per layer.

Letters: B batch, N tokens, T frames, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory.config import MemoryConfig
from tensor_memory.module import TensorMemory
from tensor_memory.residual import MemoryResidual

LOSS_TOKENS = 2048
"""Tokens whose logits exist at a time: 120 MiB in bfloat16 for 30,000 words."""


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm, with a place for a memory."""

    def __init__(self, dim: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 4 * dim)
        self.narrow = nn.Linear(4 * dim, dim)

    def attend(self, x: Tensor) -> Tensor:
        """x (B, N, d) plus its attention."""
        q, k, v = self.split(self.qkv(self.attention_norm(x)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self._drop(self.project(self.merge(mixed)))

    def transform(self, x: Tensor) -> Tensor:
        """x (B, N, d) plus its MLP."""
        return x + self._drop(self.narrow(F.gelu(self.widen(self.mlp_norm(x)))))

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, 3d) -> three of (B, heads, N, d / heads)."""
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def merge(self, mixed: Tensor) -> Tensor:
        """(B, heads, N, d / heads) -> (B, N, d)."""
        return mixed.transpose(1, 2).flatten(2)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of h·Wᵀ against targets, some tokens at a time.

    The gradients are made while the logits are there, so these are computed once and never kept.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """h (tokens, d) in the type to multiply in, weight (words, d) -> a float32 scalar."""
        count, low = h.shape[0], weight.to(h.dtype)
        grad_h = torch.empty_like(h)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=h.device)
        for part, words, into in zip(
            h.split(LOSS_TOKENS),
            targets.split(LOSS_TOKENS),
            grad_h.split(LOSS_TOKENS),
            strict=True,
        ):
            logs = F.log_softmax(part @ low.t(), dim=-1, dtype=torch.float32)
            total -= logs.gather(1, words[:, None]).sum()
            wrong = logs.exp_().scatter_add_(
                1, words[:, None], logs.new_full((1, 1), -1.0).expand(len(words), 1)
            )
            wrong = (wrong / count).to(h.dtype)
            torch.mm(wrong, low, out=into)
            grad_weight += wrong.t() @ part
        ctx.save_for_backward(grad_h, grad_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """Scale what the forward made."""
        grad_h, grad_weight = ctx.saved_tensors
        return grad_h * grad.to(grad_h.dtype), grad_weight * grad, None


class LanguageModel(nn.Module):
    """A causal Transformer with a tied head; the memory follows each MLP."""

    def __init__(
        self, dim: int, heads: int, layers: int, words: int, length: int, dropout: float
    ) -> None:
        super().__init__()
        self.word = nn.Embedding(words, dim)
        self.position = nn.Parameter(torch.empty(length, dim))
        self.blocks = nn.ModuleList(
            Block(dim, heads, causal=True, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.residuals: nn.ModuleDict = nn.ModuleDict()
        self.dropout = dropout
        initialise(self)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Ids and targets (B, N) -> the mean loss."""
        x = F.dropout(self.word(ids) + self.position[: ids.shape[1]], self.dropout, self.training)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = block.transform(block.attend(x))
            if str(index) in self.residuals:
                x, _ = self.residuals[str(index)](x)
        h = self.norm(x).flatten(0, 1)
        if torch.is_autocast_enabled(h.device.type):
            h = h.to(torch.get_autocast_dtype(h.device.type))
        with torch.autocast(h.device.type, enabled=False):
            return LinearCrossEntropy.apply(h, self.word.weight, targets.flatten())  # type: ignore


class VideoModel(nn.Module):
    """Frames attend within themselves; the memory, between attention and MLP, joins them."""

    def __init__(
        self, dim: int, heads: int, layers: int, patches: int, frames: int, classes: int
    ) -> None:
        super().__init__()
        self.patch = nn.Linear(3 * 16 * 16, dim)
        self.place = nn.Parameter(torch.empty(patches, dim))
        self.time = nn.Parameter(torch.empty(frames, 1, dim))
        self.summary = nn.Parameter(torch.empty(1, dim))
        self.blocks = nn.ModuleList(
            Block(dim, heads, causal=False, dropout=0.1) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        self.residuals: nn.ModuleDict = nn.ModuleDict()
        initialise(self)

    def forward(self, clips: Tensor, targets: Tensor) -> Tensor:
        """Clips (B, T, patches, 768), targets (B,) -> the mean loss, read off the last frame."""
        B, T = clips.shape[:2]
        x = self.patch(clips) + self.place + self.time  # (B, T, patches, d)
        summary = self.summary.to(x.dtype).expand(B, T, 1, -1)
        x = torch.cat([summary, x], dim=2).flatten(0, 1)  # (B·T, 1 + patches, d)
        N = x.shape[1]
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = block.attend(x)
            if str(index) in self.residuals:
                clip, _ = self.residuals[str(index)](x.reshape(B, T * N, -1), flush=N)
                x = clip.reshape(B * T, N, -1)
            x = block.transform(x)
        last = self.norm(x.unflatten(0, (B, T))[:, -1, 0])
        return F.cross_entropy(self.head(last).float(), targets, label_smoothing=0.1)


def initialise(model: nn.Module) -> None:
    """Weights of standard deviation 0.02, biases zero, LayerNorms as they come."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" not in name:
            nn.init.normal_(parameter, std=0.02)


def give_memory(
    model: LanguageModel | VideoModel,
    dim: int,
    config: MemoryConfig,
    layers: Sequence[int],
    *,
    gate_init: float,
    dropout: float,
    drop_path: float = 0.0,
) -> None:
    """Put one memory, shared, on the layers named; each has its own norm and gate."""
    memory = TensorMemory(dim, config)
    model.memory = memory
    for index in layers:
        model.residuals[str(index)] = MemoryResidual(
            memory, gate_init=gate_init, dropout=dropout, drop_path=drop_path, own_memory=False
        )


@dataclass(frozen=True)
class Host:
    """A model with its published memory, and what goes through it in a step."""

    name: str
    dim: int
    layers: int
    batch: int
    build: Callable[[], LanguageModel | VideoModel]
    draw: Callable[[torch.device], tuple[Tensor, Tensor]]
    memory: MemoryConfig
    gate_init: float
    dropout: float
    drop_path: float
    tokens: tuple[int, int]
    """Pieces whose ends are written, and tokens in each: one sequence, or 8 frames."""

    def steps(self, chunk_size: int) -> int:
        """S, the scan's length per layer."""
        pieces, tokens = self.tokens
        return pieces * -(-tokens // chunk_size)


def language_host(*, quick: bool = False, batch: int = 32) -> Host:
    """d 384, 8 heads, 8 layers, 30,000 words, B × 512 tokens; C 32, 8³, K 16."""
    if quick:
        dim, heads, layers, words, batch, length = 16, 2, 2, 50, 2, 24
        memory = MemoryConfig(channels=16, grid=(3, 3, 3), chunk_size=8)
    else:
        dim, heads, layers, words, length = 384, 8, 8, 30_000, 512
        memory = MemoryConfig(channels=32, grid=(8, 8, 8), chunk_size=16)

    def draw(device: torch.device) -> tuple[Tensor, Tensor]:
        ids = torch.randint(words, (batch, length + 1)).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return Host(
        name="language",
        dim=dim,
        layers=layers,
        batch=batch,
        build=lambda: LanguageModel(dim, heads, layers, words, length, dropout=0.2),
        draw=draw,
        memory=memory,
        gate_init=0.0,
        dropout=0.2,
        drop_path=0.0,
        tokens=(1, length),
    )


def video_host(*, quick: bool = False, batch: int = 32) -> Host:
    """d 256, 8 heads, 6 layers, B clips of 8 frames of 1 + 196 tokens; C 64, 8³, K 8."""
    if quick:
        dim, heads, layers, batch, frames, patches = 16, 2, 2, 2, 2, 9
        memory = MemoryConfig(channels=16, grid=(3, 3, 3), chunk_size=4)
    else:
        dim, heads, layers, frames, patches = 256, 8, 6, 8, 196
        memory = MemoryConfig(channels=64, grid=(8, 8, 8), chunk_size=8)
    classes = 101

    def draw(device: torch.device) -> tuple[Tensor, Tensor]:
        clips = torch.randn(batch, frames, patches, 3 * 16 * 16)
        return clips.to(device), torch.randint(classes, (batch,)).to(device)

    return Host(
        name="video",
        dim=dim,
        layers=layers,
        batch=batch,
        build=lambda: VideoModel(dim, heads, layers, patches, frames, classes),
        draw=draw,
        memory=memory,
        gate_init=-2.0,
        dropout=0.1,
        drop_path=0.2,
        tokens=(frames, 1 + patches),
    )


HOSTS = {"language": language_host, "video": video_host}

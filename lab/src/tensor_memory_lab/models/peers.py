"""The field's recurrent mechanisms with a state of fixed size, each as its authors have it.

They differ in decay, delta rule, convolution, norm and gate, and share one recurrence
(`gated_rule`). Definitions and initial values follow the layers of flash-linear-attention; linear
layers start as PyTorch starts them. The recurrence runs in chunks of our own, in float32, or by
that library's kernels (`PeerConfig.backend`). The size of the state is chosen from a budget of
bytes (`PeerConfig`); the three tokens that a short convolution keeps come on top, and `state_bytes`
counts them. What authors keep free of weight decay has one dimension, as the optimiser expects.

Letters: B batch, N tokens, d width, H heads, K width of a key, V of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory_lab.choices import check_choices
from tensor_memory_lab.models.fla_kernels import fla_rule, load_kernel
from tensor_memory_lab.models.gated_rule import gated_rule
from tensor_memory_lab.models.side import FLOAT_BYTES, TAPS, SideMemory, State

EPSILON = 1e-5
"""Of the norms on what is read."""


@dataclass(frozen=True)
class PeerConfig:
    """How much a peer may keep."""

    state_bytes: int = 32_768
    """Bytes per layer and row of the recurrent state, in float32."""
    heads: int = 4
    """Heads that share them; Mamba-2 has heads of 64 features instead, as many as it needs."""
    backend: Literal["torch", "fla"] = "torch"
    """torch: chunks in float32, on any device. fla: flash-linear-attention's kernels, bfloat16 on a
    GPU. On Hopper with Triton 3.4 to 3.7.0 they refuse the backward of gated-deltanet and mamba2;
    deltanet and kda, whose backward crashes there, are refused here.
    """

    def __post_init__(self) -> None:
        check_choices(self, "model.peer")
        if self.heads < 1 or self.values < self.heads:
            raise ValueError(
                f"peer: expected 1 head or more and {FLOAT_BYTES} bytes or more for each, got "
                f"{self.heads} heads and {self.state_bytes} bytes"
            )

    @property
    def values(self) -> int:
        """Numbers in the state."""
        return self.state_bytes // FLOAT_BYTES

    def sizes(self, ratio: float = 1.0) -> tuple[int, int]:
        """Key and value widths of a head that fill the budget best, near V = ratio · K.

        >>> PeerConfig(32_768, heads=4).sizes(2), PeerConfig(32_768, heads=2).sizes()
        ((32, 64), (64, 64))
        """
        area = self.values // self.heads
        best = math.sqrt(area / ratio)
        keys = range(max(math.ceil(best / 1.5), 1), max(math.floor(best * 1.5), 1) + 1)
        # Among those that leave equally little unused the one nearest to the ratio.
        key = min(keys, key=lambda key: (area % key, abs(math.log(key / best)), -key))
        return key, area // key


class Peer(SideMemory):
    """What the mechanisms share: projections, a short convolution, the norm on what is read.

    Args:
        dim: d.
        config: the budget.
    """

    def __init__(self, dim: int, config: PeerConfig) -> None:
        super().__init__()
        self.dim, self.heads = dim, config.heads
        self.kernel = load_kernel(self.operator) if config.backend == "fla" else None
        self.key, self.value = config.sizes(self.ratio)

    def zeros(self, rows: int, like: Tensor) -> State:
        """An empty state."""
        made = {"state": wide(like.new_zeros(rows, self.heads, self.key, self.value))}
        if self.kept_features:
            made["tokens"] = like.new_zeros(rows, self.kept_tokens, self.kept_features)
        return made

    def state_bytes(self) -> int:
        """Bytes that one row carries: the recurrent state, and what a convolution keeps."""
        state = self.heads * self.key * self.value
        return FLOAT_BYTES * (state + self.kept_tokens * self.kept_features)

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        decay: Tensor | None = None,
        rate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What queries read (B, N, H, V), the state after; with rates (B, N, H) the delta rule."""
        if self.kernel is not None:
            q, k = (x.expand(-1, -1, self.heads, -1) for x in (q, k))
            return fla_rule(self.kernel, state, q=q, k=k, v=v, g=decay, beta=rate)
        if rate is None:
            return gated_rule(q, k, v, decay, None, state)
        rate = rate[..., None]
        return gated_rule(q, k, rate * v, decay, rate * k, state)

    ratio = 1.0
    """The authors' V over K; the widths that fill the budget come near it."""
    operator = ""
    """Package and name of the recurrence in flash-linear-attention."""
    kept_tokens = TAPS - 1
    """Tokens before that are kept for a convolution."""
    kept_features = 0
    """Features of each of them."""

    def _by_head(self, x: Tensor) -> Tensor:
        """(B, N, H · e) -> (B, N, H, e)."""
        return x.unflatten(-1, (self.heads, -1))


class GatedLinearAttention(Peer):
    """Gated linear attention (Yang et al., 2023): a decay per feature of a key, no convolution."""

    ratio = 2.0
    operator = "gla.chunk_gla"
    rank, normalizer = 16, 16.0

    def __init__(self, dim: int, config: PeerConfig) -> None:
        super().__init__(dim, config)
        keys, values = self.heads * self.key, self.heads * self.value
        self.split = (keys, keys, values, values)
        self.project = nn.Linear(dim, sum(self.split), bias=False)  # q, k, v and the gate
        self.decay = low_rank(dim, self.rank, keys, bias=True)
        self.norm = nn.RMSNorm(self.value, eps=EPSILON)
        self.output = nn.Linear(values, dim, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x (B, N, d) -> m (B, N, d), state."""
        state = self.zeros(x.shape[0], x) if state is None else state
        q, k, v, gate = (self._by_head(part) for part in self.project(x).split(self.split, -1))
        decay = F.logsigmoid(wide(self._by_head(self.decay(x)))) / self.normalizer
        read, after = self.recurrence(q * self.key**-0.5, k, v, state["state"], decay)
        return self.output((self.norm(read) * F.silu(gate)).flatten(2)), {"state": after}


class DeltaNet(Peer):
    """DeltaNet (Yang et al., 2024): the delta rule, no decay, no gate."""

    operator = "delta_rule.chunk_delta_rule"

    def __init__(self, dim: int, config: PeerConfig) -> None:
        super().__init__(dim, config)
        keys, values = self.heads * self.key, self.heads * self.value
        self.split = (keys, keys, values)
        self.kept_features = sum(self.split)
        self.project = nn.Linear(dim, self.kept_features, bias=False)  # q, k and v
        self.convolution = Convolution(self.kept_features)
        self.rate = nn.Linear(dim, self.heads, bias=False)
        self.norm = nn.RMSNorm(self.value, eps=EPSILON)
        self.output = nn.Linear(values, dim, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x (B, N, d) -> m (B, N, d), state."""
        state = self.zeros(x.shape[0], x) if state is None else state
        mixed, tokens = self.convolution(self.project(x), state["tokens"])
        queries_keys, v = mixed.split((2 * self.split[0], self.split[2]), -1)
        q, k = unit(queries_keys.unflatten(-1, (2, self.heads, -1))).unbind(2)
        v = self._by_head(v)
        rate = self.rate(x).to(k.dtype).sigmoid()
        read, after = self.recurrence(q, k, v, state["state"], self.log_decay(x), rate)
        read = read * self.key**-0.5
        return self.output(self.gate_read(self.norm(read), x)), {"state": after, "tokens": tokens}

    def log_decay(self, x: Tensor) -> Tensor | None:
        """None: nothing decays."""

    def gate_read(self, read: Tensor, x: Tensor) -> Tensor:
        """(B, N, H, V) -> (B, N, H · V)."""
        return read.flatten(2)


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet (Yang et al., 2024): DeltaNet with Mamba-2's decay and an output gate."""

    ratio = 2.0
    operator = "gated_delta_rule.chunk_gated_delta_rule"

    def __init__(self, dim: int, config: PeerConfig) -> None:
        super().__init__(dim, config)
        self.step = nn.Linear(dim, self.heads, bias=False)
        self.log_speed = nn.Parameter(torch.empty(self.heads).uniform_(0, 16).log())
        self.step_bias = nn.Parameter(steps_at_start(self.heads))
        self.gate = nn.Linear(dim, self.heads * self.value, bias=False)

    def log_decay(self, x: Tensor) -> Tensor:
        """−e^A · softplus(step + bias), (B, N, H)."""
        return -self.log_speed.exp() * F.softplus(wide(self.step(x)) + self.step_bias)

    def gate_read(self, read: Tensor, x: Tensor) -> Tensor:
        """(B, N, H, V) -> (B, N, H · V), times the gate."""
        return read.flatten(2) * F.silu(self.gate(x))


class KimiDeltaAttention(GatedDeltaNet):
    """KDA (Kimi Linear, 2025): Gated DeltaNet with a decay per feature of a key."""

    ratio = 1.0
    operator = "kda.chunk_kda"

    def __init__(self, dim: int, config: PeerConfig) -> None:
        super().__init__(dim, config)
        keys, values = self.heads * self.key, self.heads * self.value
        self.step = low_rank(dim, self.value, keys)
        self.gate = low_rank(dim, self.value, values, bias=True)
        self.log_speed = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.step_bias = nn.Parameter(steps_at_start(keys))

    def log_decay(self, x: Tensor) -> Tensor:
        """−e^A · softplus(step + bias), (B, N, H, K)."""
        step = wide(self.step(x)) + self.step_bias
        return -self.log_speed.exp()[:, None] * F.softplus(self._by_head(step))

    def gate_read(self, read: Tensor, x: Tensor) -> Tensor:
        """(B, N, H, V) -> (B, N, H · V), times the gate."""
        return read.flatten(2) * self.gate(x).sigmoid()


class Mamba2(Peer):
    """Mamba-2 (Dao & Gu, 2024): twice the width, heads that share queries and keys, a skip."""

    operator = "simple_gla.chunk_simple_gla"
    expand, head = 2, 64

    def __init__(self, dim: int, config: PeerConfig) -> None:
        super().__init__(dim, config)
        inner = self.expand * dim
        self.value = math.gcd(self.head, inner)
        self.heads, self.key = inner // self.value, config.values // inner
        if self.key < 1:
            raise ValueError(
                f"peer.state_bytes: expected {FLOAT_BYTES * inner} or more for mamba2 of width "
                f"{dim}, got {config.state_bytes}"
            )
        self.kept_features = inner + 2 * self.key
        self.split = (inner, self.kept_features, self.heads)
        self.project = nn.Linear(dim, sum(self.split), bias=False)  # gate, convolved, steps
        self.convolution = Convolution(self.kept_features, bias=True)
        self.log_speed = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.step_bias = nn.Parameter(steps_at_start(self.heads))
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm = nn.RMSNorm(inner, eps=EPSILON)
        self.output = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x (B, N, d) -> m (B, N, d), state."""
        state = self.zeros(x.shape[0], x) if state is None else state
        gate, mixed, step = self.project(x).split(self.split, -1)
        mixed, tokens = self.convolution(mixed, state["tokens"])
        v, k, q = mixed.split((self.split[0], self.key, self.key), -1)
        v = self._by_head(v)
        step = F.softplus(wide(step) + self.step_bias)  # (B, N, H)
        decay = -self.log_speed.exp() * step
        read, after = self.recurrence(
            q[:, :, None], k[:, :, None], step[..., None] * v, state["state"], decay
        )
        read = (read + self.skip[:, None] * v).flatten(2)
        m = self.output(self.norm(read * F.silu(gate)))  # the norm comes after the gate
        return m, {"state": after, "tokens": tokens}


class RWKV7(Peer):
    """RWKV-7 "Goose" (Peng et al., 2025): a decay and a rate of erasing per feature of a key.

    A token is mixed with the one before it instead of a convolution. Two of the original's parts
    reach over layers and are left out: values mixed with those of the first layer, and initial
    values that change with depth (all layers start as the first).
    """

    operator = "generalized_delta_rule.chunk_dplr_delta_rule"
    kept_tokens = 1

    def __init__(self, dim: int, config: PeerConfig) -> None:
        super().__init__(dim, config)
        H, K, V = self.heads, self.key, self.value
        self.kept_features = dim
        place = torch.arange(dim) / dim
        powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2])[:, None]
        self.shift = nn.Parameter((1 - place**powers).flatten())  # of r, w, k, v, a and the gate
        self.read = nn.Linear(dim, H * K, bias=False)
        self.keys = nn.Linear(dim, H * K, bias=False)
        self.values = nn.Linear(dim, H * V, bias=False)
        rank = max(32, round(2.5 * dim**0.5 * K / 64 / 32) * 32)
        self.decay = LowRank(dim, rank, H * K, nn.Tanh())
        self.rate = LowRank(dim, rank, H * K, nn.Identity())
        self.gate = LowRank(dim, max(32, round(5 * dim**0.5 / 32) * 32), H * V, nn.Sigmoid(), False)
        linear = torch.linspace(-0.5, 0.5, H * K)
        zigzag = torch.linspace(-1, 1, K).repeat(H)
        zigzag = zigzag * zigzag.abs()
        self.erased = nn.Parameter(0.71 - 0.1 * linear)
        self.slowed = nn.Parameter(torch.full((H * K,), 1.02))
        self.bonus = nn.Parameter(torch.full((H * K,), -0.04))
        self.norm = nn.GroupNorm(H, H * V, eps=K * EPSILON)
        self.output = nn.Linear(H * V, dim, bias=False)
        with torch.no_grad():
            for layer, gain in ((self.read, 1.0), (self.keys, 0.1), (self.values, 1.0)):
                nn.init.orthogonal_(layer.weight, gain)
            self.output.weight.zero_()
            self.decay.up.bias.copy_(-5.5 + 6 * (linear + 0.5) + 2.5 * zigzag)
            self.rate.up.bias.copy_(-0.19 + 0.3 * zigzag + 0.4 * linear)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x (B, N, d) -> m (B, N, d), state."""
        B, N, _ = x.shape
        state = self.zeros(B, x) if state is None else state
        tokens = torch.cat([state["tokens"].to(x.dtype), x], 1)
        xs = x + (tokens[:, :N] - x) * self.shift.view(6, 1, 1, -1)  # (6, B, N, d)
        for_r, for_w, for_k, for_v, for_a, for_gate = xs
        decay = -math.exp(-0.5) * wide(self._by_head(self.decay(for_w))).sigmoid()
        rate = self.rate(for_a).sigmoid()
        k, v, r = self.keys(for_k), self._by_head(self.values(for_v)), self.read(for_r)
        gone = F.normalize(wide(self._by_head(k * self.erased)), dim=-1)
        k, r = (self._by_head(part) for part in (k * (1 + (rate - 1) * self.slowed), r))
        back = gone * self._by_head(rate)
        if self.kernel is not None:
            read, after = fla_rule(
                self.kernel, state["state"], q=r, k=k, v=v, a=-gone, b=back, gk=decay
            )
        else:
            read, after = dplr_rule(r, k, v, decay, gone, back, state["state"])
        read = self.norm(read.flatten(0, 1).flatten(1)).view(B, N, self.heads, -1)
        read = read + (r * k * self.bonus.view(self.heads, -1)).sum(-1, keepdim=True) * v
        m = self.output(read.flatten(2) * self.gate(for_gate))
        return m, {"state": after, "tokens": tokens[:, N:].to(state["tokens"].dtype)}


def dplr_rule(
    r: Tensor, k: Tensor, v: Tensor, decay: Tensor, gone: Tensor, back: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """S ← e^{w} S − b (aᵀ S) + k vᵀ, o = rᵀ S: RWKV-7's recurrence, a = gone and b = back.

    A token takes two steps of `gated_rule`: one decays and erases, one adds. The erasing key there
    meets a state that has decayed, which a division undoes; w ≥ −0.61, so it is harmless.
    """
    nothing, none = torch.zeros_like(decay), torch.zeros_like(v)
    first = {"q": nothing, "k": back, "v": none, "decay": decay, "erase": gone * (-decay).exp()}
    second = {"q": r, "k": k, "v": v, "decay": nothing, "erase": nothing}
    both = {name: torch.stack([wide(x), wide(second[name])], 2) for name, x in first.items()}
    read, after = gated_rule(**{n: x.flatten(1, 2) for n, x in both.items()}, state=state)
    return read[:, 1::2], after


class LowRank(nn.Module):
    """RWKV's two small products with something between; the first starts at zero."""

    def __init__(
        self, dim: int, rank: int, features: int, between: nn.Module, bias: bool = True
    ) -> None:
        super().__init__()
        self.down, self.between = nn.Linear(dim, rank, bias=False), between
        self.up = nn.Linear(rank, features, bias=bias)
        gain = 0.1 * max(1.0, math.sqrt(rank / features))
        nn.init.zeros_(self.down.weight)
        nn.init.orthogonal_(self.up.weight, gain)
        if bias:
            nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., features)."""
        return self.up(self.between(self.down(x)))


class Convolution(nn.Module):
    """A causal convolution of four tokens, feature by feature, then SiLU."""

    def __init__(self, features: int, *, bias: bool = False) -> None:
        super().__init__()
        # As `nn.Conv1d` starts: uniform within one over the root of what is summed.
        self.taps = nn.Parameter(torch.empty(TAPS, features).uniform_(-0.5, 0.5))  # own token last
        self.bias = nn.Parameter(torch.empty(features).uniform_(-0.5, 0.5)) if bias else None

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, N, e) after `before` (B, 3, e) -> mixed, the last three tokens."""
        N = x.shape[1]
        tokens = wide(torch.cat([before.to(x.dtype), x], 1))  # once, and not for every tap
        mixed = self.taps[0] * tokens[:, :N]
        for k in range(1, TAPS):
            mixed = torch.addcmul(mixed, self.taps[k], tokens[:, k : k + N])
        mixed = mixed if self.bias is None else mixed + self.bias
        return F.silu(mixed), tokens[:, N:].to(before.dtype)


def low_rank(dim: int, rank: int, features: int, *, bias: bool = False) -> nn.Sequential:
    """Two linear layers, the last with a bias or not."""
    return nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, features, bias=bias))


def wide(x: Tensor) -> Tensor:
    """x in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit(x: Tensor) -> Tensor:
    """x (..., e) at unit length, in float32 or better."""
    x = wide(x)
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def steps_at_start(size: int) -> Tensor:
    """Biases whose softplus is spread evenly over log 0.001 … log 0.1, as Mamba's steps start."""
    step = torch.empty(size).uniform_(math.log(0.001), math.log(0.1)).exp()
    return step + torch.log(-torch.expm1(-step))


PEERS: dict[str, Callable[[int, PeerConfig], Peer]] = {
    "gla": GatedLinearAttention,
    "deltanet": DeltaNet,
    "gated-deltanet": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "mamba2": Mamba2,
    "rwkv7": RWKV7,
}
"""By the name that a side path has."""

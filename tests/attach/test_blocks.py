"""What counts as a row of blocks, and how wide it is, told by structure and not by one library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import SMALL, WIDTH, TimmBlock, TimmViT
from torch import Tensor, nn

from tensor_memory import attach
from tensor_memory.attachment import NoBlocksFoundError
from tensor_memory.attachment.blocks import find_blocks


class MLP(nn.Module):
    """Named and built like nothing that attends."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Attn(MLP):
    """Attends, by its own name alone."""


def linear(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out)


def named(*names: str) -> nn.Module:
    return nn.ModuleDict({name: linear() for name in names})


def row(*parts: nn.Module) -> nn.Module:
    """Two blocks of these parts."""
    return nn.ModuleDict({"row": nn.ModuleList(nn.Sequential(*parts) for _ in range(2))})


NORM = nn.LayerNorm(WIDTH)


@pytest.mark.parametrize(
    "attention",
    [
        Attn(),
        nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        named("query", "key", "value"),
        named("q_proj", "k_proj", "v_proj"),
        named("wq", "wk", "wv"),
        named("Wqkv"),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_part_attends_by_its_kind_or_by_its_projections(attention: nn.Module) -> None:
    blocks = find_blocks(row(NORM, attention, linear(24)))
    assert [(block.path, block.dim) for block in blocks] == [("row.0", WIDTH), ("row.1", WIDTH)]


@pytest.mark.parametrize(
    "parts",
    [
        (NORM, named("q_proj", "k_proj"), linear()),
        (NORM, named("up", "down"), linear()),
        (NORM, nn.MultiheadAttention(WIDTH, 2)),  # nothing beside the attention
    ],
    ids=["no values", "no attention", "attention alone"],
)
def test_what_does_not_attend_or_does_nothing_else_is_no_block(parts: Any) -> None:
    with pytest.raises(NoBlocksFoundError):
        find_blocks(row(*parts))


class GatedDeltaNet(MLP):
    """Mixes tokens, by its name alone."""


def convolution(groups: int, kernel: int = 4) -> nn.Conv1d:
    return nn.Conv1d(WIDTH, WIDTH, kernel, groups=groups)


@pytest.mark.parametrize("mixer", [GatedDeltaNet(), convolution(WIDTH)], ids=["name", "depthwise"])
def test_what_mixes_tokens_without_attention_is_a_block_with_nothing_beside_it(mixer: Any) -> None:
    assert [block.path for block in find_blocks(row(NORM, mixer))] == ["row.0", "row.1"]


@pytest.mark.parametrize("mixer", [convolution(1), convolution(WIDTH, 7)], ids=["dense", "long"])
def test_the_convolutions_of_codecs_are_no_blocks(mixer: nn.Module) -> None:
    with pytest.raises(NoBlocksFoundError):
        find_blocks(row(NORM, mixer, linear()))


class Holds(nn.Module):
    """A block of a mixed row."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(WIDTH), part


class HoldsToo(Holds):
    """One of another class."""


def test_a_mixed_row_is_found_whole() -> None:
    """As NemotronH has it, of one class; of several classes each must mix tokens."""
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    mixed = nn.ModuleList([Holds(GatedDeltaNet()), Holds(attention), Holds(MLP())])
    assert [block.path for block in find_blocks(nn.ModuleDict({"row": mixed}))] == [
        "row.0",
        "row.1",
        "row.2",
    ]
    mixed.append(HoldsToo(GatedDeltaNet()))
    assert len(find_blocks(nn.ModuleDict({"row": mixed}))) == 4
    mixed.append(HoldsToo(MLP()))
    assert len(find_blocks(nn.ModuleDict({"row": mixed}))) == 5
    mixed.append(MLP())
    with pytest.raises(NoBlocksFoundError):
        find_blocks(nn.ModuleDict({"row": mixed}))


def test_a_block_may_be_named_after_attention_itself() -> None:
    class AttentionBlock(TimmBlock):
        pass

    model = nn.Sequential(AttentionBlock(), AttentionBlock())
    assert [block.path for block in find_blocks(model)] == ["0", "1"]


def test_an_empty_list_is_no_second_row() -> None:
    model = TimmViT()
    model.adapters = nn.ModuleList()
    assert [block.path for block in find_blocks(model)] == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("parts", "width"),
    [
        ((NORM, nn.PReLU(), linear(24)), WIDTH),  # one number scales no features
        ((NORM, nn.ModuleList([nn.LayerNorm(8)]), linear(24)), WIDTH),  # of each head
        ((nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(8, 8)), WIDTH),
        ((nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), named("q")), WIDTH),
    ],
    ids=["scalar", "heads", "attention", "square"],
)
def test_the_width_is_that_of_the_norms_else_of_the_attention(parts: Any, width: int) -> None:
    (block, _) = find_blocks(row(*parts), "row.*")
    assert block.dim == width


def test_a_config_decides_between_norms_of_several_widths() -> None:
    model: Any = row(NORM, nn.LayerNorm(8), linear(24))
    with pytest.raises(ValueError, match=r"width of block 'row\.0' .* cannot be inferred"):
        find_blocks(model, "row.*")
    model["row"].config = SimpleNamespace(hidden_size=8)  # of a part: the host may be wrapped
    assert [block.dim for block in find_blocks(model, "row.*")] == [8, 8]


def test_blocks_on_several_devices_cannot_share_a_memory() -> None:
    model = TimmViT()
    model.blocks[1].to("meta")
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\); pass share_weights="):
        attach(model, SMALL)
    attachment = attach(model, SMALL, share_weights=False)
    assert [next(layer.parameters()).device.type for layer in attachment.layers] == ["cpu", "meta"]


def test_the_type_of_the_memory_is_that_of_the_weights_that_compute() -> None:
    model = TimmViT().bfloat16()
    for block in model.blocks:
        table = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
        block.register_parameter("table", table)  # comes first among the block's parameters
    attachment = attach(model, SMALL)
    assert {p.dtype for p in attachment.parameters()} == {torch.bfloat16}

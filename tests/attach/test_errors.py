"""Bad input: each a clear error, and the host left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hosts import SMALL, WIDTH, TimmViT, bert, encoder, ids, llama, new_host
from torch import Tensor, nn

from tensor_memory import attach, detach, memory_disabled
from tensor_memory.attachment import NoBlocksFoundError


def untouched(model: nn.Module) -> bool:
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    trained = all(p.requires_grad for p in model.parameters())
    return hooks == 0 and trained and not hasattr(model, "tensor_memory")


def refused(model: nn.Module, error: type[Exception], match: str, **options: Any) -> None:
    keys = list(model.state_dict())
    with pytest.raises(error, match=match):
        attach(model, options.pop("config", SMALL), freeze_host=True, **options)
    assert untouched(model)
    assert list(model.state_dict()) == keys


def test_a_model_without_blocks_lists_what_repeats_in_it() -> None:
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    model = nn.ModuleDict({"features": convolutions, "head": nn.Linear(8, 2)})
    refused(
        model,
        NoBlocksFoundError,
        r"expected a row of .* in ModuleDict, got none; .*'features\.\*' \(2 × Conv2d\)",
    )


def test_a_part_of_a_host_with_a_memory_is_refused() -> None:
    model, tokens = llama().double().eval(), ids()
    bare = model(tokens).logits
    attach(model, SMALL, gate_init=3.0)
    with pytest.raises(
        ValueError, match=r"block 'layers.0' already carries a memory, attached to a LlamaForCaus"
    ):
        attach(model.model, SMALL)
    detach(model)
    assert torch.equal(model(tokens).logits, bare)


def test_a_model_without_anything_repeated_lists_its_parts() -> None:
    refused(
        nn.ModuleDict({"head": nn.Linear(8, 2)}), NoBlocksFoundError, r"parts are 'head' \(Linear\)"
    )


@pytest.mark.parametrize(
    "layers", ["encoder.blocks.*", ["encoder.layer.0", "encoder.layer.7"], lambda *_: False]
)
def test_layers_that_match_nothing_are_an_error(layers: Any) -> None:
    refused(bert(), NoBlocksFoundError, r"match.*'encoder\.layer\.\*' \(2 × ", layers=layers)


class Listed(nn.Module):
    """Blocks that are lists of their parts, whose sums the host computes itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self._block(kind) for _ in range(2))

    def _block(self, kind: str) -> nn.Module:
        attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        feed = nn.Linear(WIDTH, WIDTH)
        if kind == "dict":
            return nn.ModuleDict({"attend": attention, "feed": feed})
        return nn.ModuleList([attention, feed])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            attention, feed = block.values() if isinstance(block, nn.ModuleDict) else block
            x = x + attention(x, x, x)[0]
            x = x + feed(x)
        return x


@pytest.mark.parametrize(("kind", "feed"), [("list", "1"), ("dict", "feed")])
def test_blocks_that_are_never_called_are_not_found(kind: str, feed: str) -> None:
    refused(
        Listed(kind),
        NoBlocksFoundError,
        rf"expected a row of .* in Listed, got none; .*'layers\.\*\.{feed}' \(2 × Linear\)$",
    )
    host, x = Listed(kind), torch.randn(1, 9, WIDTH)
    bare = host(x)
    assert attach(host, SMALL, layers=f"layers.*.{feed}").paths == [
        f"layers.0.{feed}",
        f"layers.1.{feed}",
    ]
    assert not torch.allclose(host(x), bare)


def test_a_stage_that_returns_another_width_is_named() -> None:
    sizes = dict(image_size=16, patch_size=2, embed_dim=8, window_size=4)
    model = new_host("SwinModel", depths=[1, 1], num_heads=[2, 2], **sizes).float()
    attach(model, SMALL, share_weights=False)
    with pytest.raises(
        ValueError,
        match=r"block 'encoder\.layers\.0' to return .* of width 8, .* got \(2, 16, 16\)",
    ):
        model(torch.randn(2, 3, 16, 16))
    detach(model)
    attach(model, SMALL, layers="encoder.layers.*.blocks.*", share_weights=False)
    assert model(torch.randn(2, 3, 16, 16)).last_hidden_state.isfinite().all()


def test_rows_inside_a_list_of_lists_are_several() -> None:
    refused(
        new_host("FunnelBaseModel", block_sizes=[1, 1], d_head=8, d_inner=24),
        ValueError,
        r"several rows .*'encoder\.blocks\.0\.\*', 'encoder\.blocks\.1\.\*'",
    )


class HyperConnection(nn.Module):
    """Mixes residual streams."""


class Streams(nn.Module):
    """A block that returns (B, N, streams, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.connection, self.mlp = HyperConnection(), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)


def test_a_block_of_several_residual_streams_is_refused_at_once() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Streams(), Streams()])})
    cause = r"one residual stream, got 'layers.0' \(Streams\), whose 'connection' .*mixes several"
    refused(model, ValueError, cause + r".* layers='layers.\*.mlp'")
    assert attach(model, SMALL, layers="layers.*.mlp").paths == ["layers.0.mlp", "layers.1.mlp"]


@pytest.mark.parametrize(
    ("layers", "every", "paths"),
    [
        ("encoder.layer.*", 1, None),  # a star does not reach into the blocks
        (["encoder.layer.1"], 1, ["encoder.layer.1"]),
        (["encoder.layer.[12]", "encoder.layer.2"], 1, ["encoder.layer.1", "encoder.layer.2"]),
        (lambda path, module: type(module).__name__ == "BertLayer", 1, None),
        ("auto", 2, ["encoder.layer.0", "encoder.layer.2"]),
    ],
    ids=["star", "list", "list that names one twice", "predicate", "every second"],
)
def test_blocks_can_be_chosen(layers: Any, every: int, paths: list[str] | None) -> None:
    model = bert(num_hidden_layers=4)
    attachment = attach(model, SMALL, layers=layers, every=every)
    assert attachment.paths == (paths or [f"encoder.layer.{i}" for i in range(4)])
    model(ids())


def test_naming_a_list_of_blocks_says_how_to_name_the_blocks() -> None:
    refused(
        bert(),
        ValueError,
        r"never called itself; .*layers='encoder.layer.\*'",
        layers=("encoder.layer"),
    )


def test_several_rows_of_blocks_ask_for_a_choice() -> None:
    model = new_host("T5ForConditionalGeneration", num_layers=2)
    refused(model, ValueError, r"several rows .* one of 'encoder\.block\.\*', 'decoder\.block\.\*'")
    attachment = attach(model, SMALL, layers="decoder.block.*")
    assert attachment.paths == ["decoder.block.0", "decoder.block.1"]


class Bare(nn.Module):
    """Attends, and has nothing that tells its width."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 96), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))


def test_a_width_that_cannot_be_inferred_must_be_given() -> None:
    model = nn.Sequential(Bare(), Bare())
    refused(
        model,
        ValueError,
        r"width of block '0' \(Bare\) cannot be inferred .* pass dim=",
        layers="*",
    )
    attach(model, SMALL, layers="*", dim=WIDTH)
    assert model(torch.randn(1, 5, WIDTH)).shape == (1, 5, WIDTH)


def test_a_memory_for_another_width_is_an_error() -> None:
    refused(bert(), ValueError, "dim: expected 16, the width of block .*, got 32; leave", dim=32)


def test_blocks_of_several_widths_cannot_share_a_memory() -> None:
    model = nn.ModuleDict({"small": TimmViT().blocks, "large": encoder().layers})
    model["large"] = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 12)])
    refused(
        model,
        ValueError,
        r"several widths \(8, 16\); pass share_weights=False",
        layers=["small.*", "large.*"],
    )
    attachment = attach(model, SMALL, layers=["small.*", "large.*"], share_weights=False)
    assert attachment.dims == [16, 16, 8]


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [("scope", "model", ValueError), ("layers", 3, TypeError), ("dropout", 2.0, ValueError)],
)
def test_a_wrong_option_leaves_the_host_alone(
    option: str, value: Any, error: type[Exception]
) -> None:
    refused(bert(), error, f"^{option}: expected", **{option: value})


def test_an_attach_that_fails_half_way_undoes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()

    def fail(*_: Any) -> None:
        raise RuntimeError("no more modules")

    monkeypatch.setattr(model, "add_module", fail)
    with pytest.raises(RuntimeError, match="no more modules"):
        attach(model, SMALL, freeze_host=True)
    monkeypatch.undo()
    assert untouched(model)
    attach(model, SMALL)


def test_a_host_with_an_attribute_of_that_name_is_refused() -> None:
    model = bert()
    model.tensor_memory = 3
    with pytest.raises(ValueError, match="already has an attribute 'tensor_memory'"):
        attach(model, SMALL)
    assert model.tensor_memory == 3


@pytest.mark.parametrize("act", [detach, lambda model: memory_disabled(model).__enter__()])
def test_what_was_not_attached_cannot_be_detached_or_disabled(act: Any) -> None:
    match = r"expected a model .*, got BertModel without one; call attach\(model"
    with pytest.raises(ValueError, match=match):
        act(bert())


def test_the_model_is_detached_and_not_its_attachment() -> None:
    attachment = attach(bert(), SMALL)
    match = r"expected the model that attach\(model, \.\.\.\) was called on, got Attachment"
    with pytest.raises(TypeError, match=match):
        detach(attachment)


def test_part_of_an_attached_host_cannot_be_attached_from_outside() -> None:
    model = llama()
    attach(model.model, SMALL)
    match = r"already has a memory attached; its part 'model' has, .* detach\(model\.model\) first"
    with pytest.raises(ValueError, match=match):
        attach(model, SMALL)
    detach(model.model)
    attach(model, SMALL)
    with pytest.raises(ValueError, match=r"already has a memory attached; detach\(model\) first"):
        attach(model, SMALL)


class Strange(nn.Module):
    """Returns what is no hidden state."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.norm, self.result = nn.LayerNorm(WIDTH), result

    def forward(self, x: Tensor) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("result", "error", "match"),
    [
        ("text", TypeError, "return a tensor, a tuple that starts with one or a model output"),
        ((None, 1), TypeError, "got tuple"),
        ((), TypeError, "got tuple"),
        (torch.zeros(1, 2, 2, WIDTH), ValueError, r"shape \(B, N, d\), got \(1, 2, 2, 16\)"),
    ],
)
def test_a_block_that_returns_no_hidden_states_is_named(
    result: Any, error: type[Exception], match: str
) -> None:
    model = nn.Sequential(Strange(result))
    attach(model, SMALL, layers="0")
    with pytest.raises(error, match=f"block '0' to return .*{match}|{match}"):
        model(torch.zeros(1, 2, WIDTH))

"""Blocks return hidden states in many wrappings; the memory goes into each and keeps the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hosts import SMALL, VOCABULARY, WIDTH, encoder, ids
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from tensor_memory import attach
from tolerances import assert_same


class Pair(NamedTuple):
    hidden: Tensor
    weights: str


@dataclass(frozen=True)
class Record:
    weights: str
    hidden_states: Tensor


class Wrapping(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.norm, self.wrap = nn.LayerNorm(WIDTH), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.norm(x))


WRAPPINGS = {
    "tensor": (lambda x: x, lambda out: out, lambda out: "kept"),
    "tuple": (lambda x: (x, "kept"), lambda out: out[0], lambda out: out[1]),
    "list": (lambda x: [x, "kept"], lambda out: out[0], lambda out: out[1]),
    "named tuple": (lambda x: Pair(x, "kept"), lambda out: out.hidden, lambda out: out.weights),
    "dataclass": (
        lambda x: Record("kept", x),
        lambda out: out.hidden_states,
        lambda out: out.weights,
    ),
    "mapping": (
        lambda x: {"weights": "kept", "last_hidden_state": x},
        lambda out: out["last_hidden_state"],
        lambda out: out["weights"],
    ),
    "mapping with another tensor before": (
        lambda x: {"mask": torch.ones(2, 9), "last_hidden_state": x},
        lambda out: out["last_hidden_state"],
        lambda out: "kept" if out["mask"].eq(1).all() else "changed",
    ),
    "mapping of no known name": (
        lambda x: {"weights": "kept", "tokens": x},
        lambda out: out["tokens"],
        lambda out: out["weights"],
    ),
    "model output": (
        lambda x: BaseModelOutput(last_hidden_state=x, attentions="kept"),
        lambda out: out.last_hidden_state,
        lambda out: out["attentions"],
    ),
}


@pytest.mark.parametrize(("wrap", "hidden", "rest"), WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_hidden_states_are_changed_inside_any_wrapping(wrap: Any, hidden: Any, rest: Any) -> None:
    made = []
    model = nn.Sequential(Wrapping(lambda x: (made.append(wrap(x)), made[-1])[1]))
    x = torch.randn(2, 9, WIDTH)
    bare = model(x)
    attachment = attach(model, SMALL, layers="0")
    output = model(x)
    assert torch.equal(hidden(made[-1]), hidden(bare))  # the block may have kept what it returned
    assert type(output) is type(bare)
    assert rest(output) == "kept"
    expected, _ = attachment.layers[0](hidden(bare))
    assert torch.equal(hidden(output), expected)


def test_a_row_without_a_batch_axis_keeps_its_shape() -> None:
    model = nn.Sequential(Wrapping(lambda x: x))
    x = torch.randn(9, WIDTH)
    attach(model, SMALL, layers="0")
    assert torch.equal(model(x), model(x[None])[0])


def test_a_row_without_a_batch_axis_is_no_batch_where_tokens_come_first() -> None:
    model = encoder(batch_first=False).double().eval()
    attach(model, SMALL)
    x = torch.randn(9, WIDTH, dtype=torch.float64)
    assert_same(model(x), model(x[:, None])[:, 0])


def test_a_block_may_be_given_ids_alone() -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            return self.norm(self.table(ids))

    model = nn.Sequential(Embedding())
    attachment = attach(model, SMALL, layers="0")
    tokens = ids()
    assert torch.equal(model(tokens), attachment.layers[0](model[0].forward(tokens))[0])

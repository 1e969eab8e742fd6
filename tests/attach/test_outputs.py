"""Blocks return hidden states in many wrappings; the memory goes into each and keeps the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hosts import SMALL, WIDTH
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from tensor_memory import attach


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
    "model output": (
        lambda x: BaseModelOutput(last_hidden_state=x, attentions="kept"),
        lambda out: out.last_hidden_state,
        lambda out: out["attentions"],
    ),
}


@pytest.mark.parametrize(("wrap", "hidden", "rest"), WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_hidden_states_are_changed_inside_any_wrapping(wrap: Any, hidden: Any, rest: Any) -> None:
    model = nn.Sequential(Wrapping(wrap))
    x = torch.randn(2, 9, WIDTH)
    bare = model(x)
    attachment = attach(model, SMALL, layers="0")
    output = model(x)
    assert type(output) is type(bare)
    assert rest(output) == "kept"
    expected, _ = attachment.layers[0](hidden(bare))
    assert torch.equal(hidden(output), expected)


def test_a_row_without_a_batch_axis_keeps_its_shape() -> None:
    model = nn.Sequential(Wrapping(lambda x: x))
    x = torch.randn(9, WIDTH)
    attach(model, SMALL, layers="0")
    assert torch.equal(model(x), model(x[None])[0])

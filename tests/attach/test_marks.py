"""What a caller says of its tokens holds for those tokens: masks, positions, and who said it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hosts import BOTH, SMALL, VOCABULARY, WIDTH, Custom, encoder, ids, mistral
from torch import Tensor, nn

from tensor_memory import Attachment, attach
from tolerances import assert_same

MASK = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0]])


def tokens(length: int = 8, rows: int = 1) -> Tensor:
    return torch.randn(rows, length, WIDTH, dtype=torch.float64)


def watch(attachment: Attachment) -> list[Any]:
    """The mask and the reset that each run of a block brings its memory, in order."""
    seen = []
    for layer in attachment.layers:
        layer.register_forward_hook(
            lambda _, args, kwargs, output: seen.append((kwargs["mask"], kwargs["reset"])),
            with_kwargs=True,
        )
    return seen


class Part(nn.Module):
    """A module around a block, which may be told of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.block = encoder().layers[0]

    def forward(
        self, x: Tensor, attention_mask: Any = None, position_ids: Tensor | None = None
    ) -> Tensor:
        return self.block(x)


class Whole(nn.Module):
    """A host with a block of its own before and after its part, and a way to call that part."""

    def __init__(self, call_part: Any) -> None:
        super().__init__()
        self.first, self.part, self.last = encoder().layers[0], Part(), encoder().layers[1]
        self.call_part = call_part

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.first(tokens())
        y = self.call_part(self.part, x, attention_mask)
        self.last(tokens())
        return y


def whole(call_part: Any, layers: Any = ("part.block",)) -> tuple[Any, Any]:
    model = Whole(call_part).double().eval()
    return model, watch(attach(model, SMALL, layers=layers))


def test_a_mask_given_to_a_part_of_the_host_holds_inside_it_alone() -> None:
    layers = ("first", "part.block", "last")
    model, seen = whole(lambda part, x, mask: part(x, attention_mask=MASK), layers)
    model(tokens())
    (before, _), (inside, _), (after, _) = seen
    assert before is None
    assert torch.equal(inside, MASK.bool())
    assert after is None


def test_a_part_that_is_told_nothing_has_the_mask_of_the_same_tokens() -> None:
    model, seen = whole(lambda part, x, mask: part(x))
    model(tokens(), attention_mask=MASK)
    assert torch.equal(seen[0][0], MASK.bool())


def test_a_mask_of_other_tokens_says_nothing() -> None:
    model, seen = whole(lambda part, x, mask: part(x[:, :5]))
    model(tokens(), attention_mask=MASK)
    assert seen == [(None, None)]


def test_a_mask_beside_pixels_is_that_of_the_tokens_made_of_them() -> None:
    model, seen = whole(lambda part, x, mask: part(x.flatten(2).transpose(1, 2)))
    model(torch.randn(1, WIDTH, 2, 4, dtype=torch.float64), attention_mask=MASK)
    assert torch.equal(seen[0][0], MASK.bool())


def test_a_mask_that_the_host_only_made_floats_of_still_marks_tokens() -> None:
    model, seen = whole(lambda part, x, mask: part(x, attention_mask=mask.double()))
    model(tokens(), attention_mask=MASK)
    assert torch.equal(seen[0][0], MASK.bool())


def test_a_whole_host_is_told_its_mask_after_ctrl_c_in_its_part() -> None:
    model, seen = whole(lambda part, x, mask: part(x))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.part.block.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.part(tokens())
    handle.remove()
    model(tokens(), attention_mask=MASK)
    assert torch.equal(seen[0][0], MASK.bool())


def test_a_block_that_is_given_the_last_tokens_alone_has_their_marks() -> None:
    class Narrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = encoder().layers

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x)[:, -3:])

    model = Narrowing().double().eval()
    seen = watch(attach(model, SMALL))
    model(tokens(), attention_mask=MASK)
    (wide, _), (narrow, _) = seen
    assert torch.equal(wide, MASK.bool())
    assert torch.equal(narrow, MASK.bool()[:, -3:])


def test_one_row_of_a_mask_serves_all_rows_and_another_number_does_not() -> None:
    model = Custom().double().eval()
    attach(model, SMALL)
    text = torch.randint(1, VOCABULARY, (2, 8))
    assert torch.equal(model(text, MASK), model(text, MASK.expand(2, 8)))
    with pytest.raises(ValueError, match=r"expected shape .* = \(2, 8 or more\) .* got \(3, 8\)"):
        model(text, MASK.expand(3, 8))


def test_a_row_without_a_batch_axis_has_a_padding_mask_without_one() -> None:
    model = encoder().double().eval()
    attach(model, SMALL)
    x, padding = tokens(9)[0], torch.arange(9) < 4
    assert_same(model(x, src_key_padding_mask=padding)[4:], model(x[4:]))


@pytest.mark.parametrize(
    ("positions", "starts"),
    [
        ([0, 1, 2, 0, 1, 2, 3, 4], [3]),  # without a batch axis
        ([[0, 1, 2, 0, 1, 2, 3, 4]], [3]),
        ([[0, 0]], [1]),
        ([[0, 1, 2, 0]], None),  # of other tokens
    ],
)
def test_positions_start_documents_in_the_row_they_belong_to(
    positions: Any, starts: list[int] | None
) -> None:
    model = Part().double().eval()
    seen = watch(attach(model, SMALL, layers="block"))
    given = torch.tensor(positions)
    length = 8 if starts is None else given.shape[-1]
    model(tokens(length), position_ids=given)
    ((_, reset),) = seen
    assert (None if reset is None else reset[0].nonzero().flatten().tolist()) == starts


def test_the_first_real_token_of_a_call_starts_no_document() -> None:
    """Whatever stands in the padding before it."""
    model: Any = mistral(window=1).double().eval()
    attachment = attach(model, SMALL)
    text = torch.randint(1, VOCABULARY, (1, 9))
    straight = model(text, use_cache=False).logits
    padded = torch.cat([text[:, :2], text[:, 4:]], dim=1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[9, 9, 4, 5, 6, 7, 8]])
    with attachment.stream():
        model(text[:, :4], use_cache=False)
        last = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert_same(last[:, 2:], straight[:, 4:])


def test_an_encoder_whose_config_is_the_whole_host_s_sees_its_mask() -> None:
    """BART's encoder says of itself, by that config, that it is an encoder and a decoder."""
    model: Any = transformers.BartModel(transformers.BartConfig(**BOTH)).double().eval()
    seen = watch(attach(model, SMALL, layers="encoder.layers.*"))
    text = ids()
    mask = torch.ones_like(text)
    mask[0, :4] = 0
    model(input_ids=text, attention_mask=mask, decoder_input_ids=text)
    assert len(seen) == 2
    assert all(torch.equal(found, mask.bool()) for found, _ in seen)

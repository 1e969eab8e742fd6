"""What a caller says of its tokens holds for those tokens: masks, positions, and who said it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import AXES, WAVE
from hosts import SMALL, VOCABULARY, WIDTH, Custom, encoder, ids, mistral, new_host
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

    def forward(self, x: Tensor, attention_mask: Any = None, **kwargs: Tensor) -> Tensor:
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


@pytest.mark.parametrize(
    "change", [lambda x: x[:, :5], lambda x: torch.cat([x[:, :2], x], 1)], ids=["fewer", "more"]
)
def test_a_mask_of_fewer_or_more_tokens_says_nothing_and_warns_of_padding(change: Any) -> None:
    model, seen = whole(lambda part, x, mask: part(part(change(x))))
    model(tokens(), attention_mask=torch.ones_like(MASK))
    assert seen == [(None, None)] * 2
    told = "marks padding among 8 tokens, and block 'part.block'"
    with pytest.warns(UserWarning, match=told) as warned:
        model(tokens(), attention_mask=MASK)
    assert len(warned) == 1  # once in a call
    assert seen == [(None, None)] * 4


def test_a_mask_of_other_rows_says_nothing() -> None:
    model, seen = whole(lambda part, x, mask: part(torch.cat([x] * 3)[:, :5]))
    model(tokens(rows=2), attention_mask=torch.cat([MASK] * 2))
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


def test_a_mask_of_more_tokens_than_a_block_sees_is_refused() -> None:
    """Its last columns say nothing of these tokens, unless the others are in a cache."""

    class Narrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = encoder().layers

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x)[:, -3:])

    model = Narrowing().double().eval()
    attach(model, SMALL)
    with pytest.raises(
        ValueError,
        match=r"expected 3 columns, .* 'layers.1' .* got \(1, 8\).* Pass a mask of these",
    ):
        model(tokens(), attention_mask=MASK)
    model(tokens(), attention_mask=torch.ones_like(MASK))


def test_a_mask_of_more_tokens_than_the_call_and_its_cache_is_refused() -> None:
    model: Any = mistral(window=None).double().eval()
    seen = watch(attach(model, SMALL))
    text = torch.randint(1, VOCABULARY, (1, 8))
    cache = model(text, attention_mask=MASK, use_cache=True).past_key_values
    later = torch.cat([MASK, torch.tensor([[0, 1]])], dim=1)
    seen.clear()
    model(text[:, :2], attention_mask=later, past_key_values=cache)
    assert [mask.tolist() for mask, _ in seen] == [[[False, True]]] * 2
    with pytest.raises(ValueError, match=r"expected 2 columns, .* or 12 with those of the cache"):
        model(text[:, :2], attention_mask=torch.cat([later, MASK], 1), past_key_values=cache)


def test_one_row_of_a_mask_serves_all_rows_and_another_number_does_not() -> None:
    model = Custom().double().eval()
    attach(model, SMALL)
    text = torch.randint(1, VOCABULARY, (2, 8))
    assert torch.equal(model(text, MASK), model(text, MASK.expand(2, 8)))
    with pytest.raises(ValueError, match=r"8 columns, .* and 2 rows or one, got \(3, 8\)"):
        model(text, MASK.expand(3, 8))


SPEECH: dict[str, Any] = WAVE | dict(feat_extract_norm="layer", do_stable_layer_norm=False)
HEARD: dict[str, Any] = dict(
    input_feat_per_channel=6, conv_channels=8, max_source_positions=40, pad_token_id=1
)


@pytest.mark.parametrize(
    ("name", "config", "per_token"),
    [
        ("Wav2Vec2Model", SPEECH, 4),
        ("SEWModel", SPEECH | dict(squeeze_factor=2), 8),
        ("Speech2TextModel", HEARD, 4),
    ],
)
def test_a_mask_that_the_host_shortens_is_found_as_its_blocks_see_it(
    name: str, config: dict[str, Any], per_token: int
) -> None:
    """Wav2Vec2 shortens it outside its encoder, the others inside, where blocks get 4-D masks."""
    model = new_host(name, **config)
    wave = torch.randn(2, 66, dtype=torch.float64)
    if config is HEARD:
        model, wave = model.get_encoder(), wave[..., None].expand(-1, -1, 6)
    seen = watch(attach(model, SMALL))
    mask = torch.ones(2, 66, dtype=torch.long)
    mask[1, 34:] = 0
    model(wave, attention_mask=mask)
    for found, _ in seen:
        assert found[0].all()
        assert found[1].sum() in (34 // per_token, -(-34 // per_token))
        assert found[1].int().diff().max() <= 0  # real ones first
    seen.clear()
    model(wave, attention_mask=torch.ones_like(mask))
    assert [found for found, _ in seen] == [None, None]


def test_a_mask_that_the_host_shortens_and_does_not_hand_on_is_refused() -> None:
    model = new_host("FunnelBaseModel", block_sizes=[1, 1], d_head=8, d_inner=24)
    attach(model, SMALL, layers="encoder.blocks.*.*")
    text = torch.randint(1, VOCABULARY, (2, 8))
    model(text)
    with pytest.raises(ValueError, match=r"'encoder.blocks.1.0' .* host may drop or add tokens"):
        model(text, attention_mask=MASK.expand(2, 8))


def test_a_row_without_a_batch_axis_has_a_padding_mask_without_one() -> None:
    model = encoder().double().eval()
    attach(model, SMALL)
    x, padding = tokens(9)[0], torch.arange(9) < 4
    assert_same(model(x, src_key_padding_mask=padding)[4:], model(x[4:]))


ONE = [0, 1, 2, 0, 1, 2, 3, 4]
IMAGE = [[0, 1, 1, 1, 3, 0, 1, 1], [0, 1, 1, 2, 3, 0, 1, 2], [0, 1, 2, 1, 3, 0, 1, 1]]
"""Time, height and width of two documents, each of text and an image."""


@pytest.mark.parametrize(
    ("given", "starts"),
    [
        (dict(position_ids=ONE), [3]),  # without a batch axis
        (dict(position_ids=[ONE]), [3]),
        (dict(position_ids=[[0, 0]]), [1]),
        (dict(position_ids=[[0, 1, 2, 0]]), None),  # of other tokens
        (dict(position_ids=[[row] for row in IMAGE]), [5]),
        (dict(position_ids=[[ONE], *([row] for row in IMAGE)]), [3]),  # the first counts tokens
        (dict(position_ids=[[[0, 0]]] * 3), [1]),
        (dict(cu_seq_lens_q=[0, 2, 3, 8]), [2, 3]),
        (dict(cu_seqlens=[0, 8]), None),
        (dict(seq_idx=[[0, 0, 1, 1, 1, 2, 2, 2]]), [2, 5]),
        (dict(grid_thw=[[1, 1, 2], [3, 1, 2]]), [2]),  # a video is one
        (dict(position_ids=[ONE], cu_seq_lens_q=[0, 5, 8]), [3, 5]),
    ],
)
def test_documents_start_where_an_argument_says_so(given: Any, starts: list[int] | None) -> None:
    model = Part().double().eval()
    seen = watch(attach(model, SMALL, layers="block"))
    values = {name: torch.tensor(value) for name, value in given.items()}
    length = 2 if values.get("position_ids", MASK).shape[-1] == 2 else 8
    model(tokens(length), **values)
    ((_, reset),) = seen
    assert (None if reset is None else reset[0].nonzero().flatten().tolist()) == starts


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (dict(position_ids=[[[5, 6, 2, 3]]] * 3), r"fall to another value; pass \(4, B, N\)"),
        (dict(position_ids=[[[0, 1]] * 4]), r"expected shape \(B, N\) .* got \(1, 4, 2\)"),
        (dict(position_ids=[[[[0, 1, 2, 3]]]]), r"expected shape \(B, N\) .* got \(1, 1, 1, 4\)"),
        (dict(cu_seqlens=[0, 2, 3]), r"expected the lengths of the 4 tokens .* got 3 tokens"),
    ],
)
def test_arguments_that_do_not_tell_where_documents_start_are_refused(
    given: Any, match: str
) -> None:
    model = Part().double().eval()
    attach(model, SMALL, layers="block")
    values = {name: torch.tensor(value) for name, value in given.items()}
    with pytest.raises(ValueError, match=match):
        model(tokens(4), **values)


VISION: dict[str, Any] = dict(depth=2, embed_dim=WIDTH, hidden_size=WIDTH, num_heads=2, mlp_ratio=2)


def test_images_in_one_row_of_a_vision_tower_do_not_see_each_other() -> None:
    """A video is one image of several frames, which the memory goes through."""
    config = transformers.Qwen2VLConfig(vision_config=VISION).vision_config
    tower: Any = transformers.models.qwen2_vl.modeling_qwen2_vl
    model = tower.Qwen2VisionTransformerPretrainedModel(config).double().eval()
    seen = watch(attach(model, SMALL, gate_init=3.0))
    grid = torch.tensor([[1, 2, 4], [2, 2, 2]])
    pixels = torch.randn(16, 3 * 2 * 14 * 14, dtype=torch.float64)
    both = model(pixels, grid_thw=grid).last_hidden_state
    assert [reset.nonzero().tolist() for _, reset in seen] == [[[0, 8]]] * 2
    assert_same(both[8:], model(pixels[8:], grid_thw=grid[1:]).last_hidden_state)


def test_images_in_one_row_are_told_apart_by_a_mask_of_pairs() -> None:
    model = new_host("PixtralVisionModel")
    attach(model, SMALL, gate_init=3.0)
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    both = model(pixels).last_hidden_state
    assert_same(both[:, 4:], model(pixels[1:]).last_hidden_state)


def test_images_in_one_row_that_nothing_tells_apart_are_refused() -> None:
    class Joining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = encoder().layers

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.layers[0](pixel_values.flatten(2).transpose(1, 2).reshape(1, -1, WIDTH))

    model = Joining().double().eval()
    attach(model, SMALL, layers="layers.0")
    pixels = torch.randn(3, WIDTH, 2, 2, dtype=torch.float64)
    model(pixels[:1])
    with pytest.raises(ValueError, match=r"'layers.0' sees 3 images in one row, .* one image per"):
        model(pixels)


def test_packed_rows_of_three_axes_do_not_see_each_other() -> None:
    """Qwen2-VL: text alone, whose three axes are equal."""
    model = new_host("Qwen2VLForConditionalGeneration", text_config=AXES, vision_config=VISION)
    seen = watch(attach(model, SMALL, layers="model.language_model.layers.*"))
    text = torch.randint(1, VOCABULARY, (1, 8))
    model(text, position_ids=torch.tensor(ONE).expand(3, 1, 8))
    assert [reset.nonzero().tolist() for _, reset in seen] == [[[0, 3]]] * 2
    seen.clear()
    model(text)
    assert [reset for _, reset in seen] == [None, None]


def test_positions_of_three_axes_that_a_host_makes_are_those_of_one_document() -> None:
    """Between the sound and the pictures of a video they fall."""
    falling = torch.tensor([[0, 1, 1, 1], [0, 1, 5, 3], [0, 1, 1, 2]])[:, None]

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = encoder().layers

        def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    class Host(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Decoder()

        def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
            return self.decoder(x, falling if position_ids is None else position_ids)

    model, x = Host().double(), torch.randn(1, 4, WIDTH, dtype=torch.float64)
    seen = watch(attach(model, SMALL))
    model(x)
    assert [reset for _, reset in seen] == [None] * len(seen)
    with pytest.raises(ValueError, match="that fall to another value"):
        model(x, position_ids=falling)


def test_one_position_for_all_tokens_that_a_host_makes_starts_no_document() -> None:
    """A Decision Transformer hands its GPT-2 zeros: tokens know the time by other means."""
    config = transformers.DecisionTransformerConfig(
        state_dim=2, act_dim=2, hidden_size=WIDTH, n_layer=1, n_head=2
    )
    model: Any = transformers.DecisionTransformerModel(config)
    seen = watch(attach(model, SMALL))
    model(
        states=torch.randn(1, 4, 2), actions=torch.randn(1, 4, 2), rewards=torch.randn(1, 4, 1),
        returns_to_go=torch.randn(1, 4, 1), timesteps=torch.arange(4)[None],
    )  # fmt: skip
    assert seen
    assert not any(reset is not None and reset.any() for _, reset in seen)


def test_the_padding_mask_of_an_attention_of_torch_nn_is_found() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
            return x + self.attention(x, x, x, key_padding_mask, need_weights=False)[0]

    class Host(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
            for layer in self.layers:
                x = layer(x, key_padding_mask=key_padding_mask)
            return x

    model, x = Host().double(), torch.randn(1, 6, WIDTH, dtype=torch.float64)
    attach(model, SMALL, layers="layers.*")
    padding = torch.tensor([[True, True, False, False, False, False]])
    assert_same(model(x, key_padding_mask=padding)[:, 2:], model(x[:, 2:]))


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
    model = new_host("BartModel", pad_token_id=1)
    seen = watch(attach(model, SMALL, layers="encoder.layers.*"))
    text = ids()
    mask = torch.ones_like(text)
    mask[0, :4] = 0
    model(input_ids=text, attention_mask=mask, decoder_input_ids=text)
    assert len(seen) == 2
    assert all(torch.equal(found, mask.bool()) for found, _ in seen)

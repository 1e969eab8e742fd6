"""A host's memory takes its places from the host's call, by name or by a function of arguments."""

from __future__ import annotations

import copy
import functools
from typing import Any

import peft
import pytest
import torch
import transformers
from hosts import HOSTS, TOKENS, VOCABULARY, WIDTH, encoder, llama
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tensor_memory import (
    PlaceConfig,
    attach,
    detach,
    find_leak,
    load_memory,
    memory_disabled,
    save_memory,
)
from tolerances import assert_same

MAP = PlaceConfig.map(2, grid=(4, 3), channels=3, heads=2)
LINE = PlaceConfig.map(1, grid=(5,), channels=3, heads=2)


def time(position_ids: Tensor) -> Tensor:
    """(B, N) ids below 64 as places on a line."""
    return position_ids[..., None].double() / 32 - 1


def encoder_host(config: PlaceConfig = MAP, where: Any = "pose", **options: Any) -> Any:
    model = encoder().double().eval()
    attach(model, config, where=where, gate_init=2.0, **options)
    return model


def llama_host(where: Any = time, config: PlaceConfig = LINE) -> Any:
    model: Any = llama().double().eval()
    attach(model, config, where=where, gate_init=3.0)
    return model


def tokens(rows: int = 2, length: int = TOKENS) -> Tensor:
    return torch.randn(rows, length, WIDTH, dtype=torch.float64)


def poses(rows: int = 2, length: int = TOKENS) -> Tensor:
    return torch.rand(rows, length, 2, dtype=torch.float64) * 2 - 1


def by_hand(model: Any, x: Tensor, where: Tensor) -> Tensor:
    """What the layers of an `nn.TransformerEncoder` and their memories give, one by one."""
    with memory_disabled(model):
        for block, layer in zip(model.layers, model.tensor_memory.layers, strict=True):
            x, _ = layer(block(x), where=where)
    return x


@given(
    rows=st.integers(1, 3),
    length=st.integers(2, 9),  # a token alone reads what it wrote, wherever that is
    places=st.sampled_from(["given", "offset"]),
    by_head=st.booleans(),
    one_row=st.booleans(),
    shared=st.booleans(),
    function=st.booleans(),
)
def test_the_memory_reads_and_writes_where_the_call_says(
    rows: int,
    length: int,
    places: Any,
    by_head: bool,
    one_row: bool,
    shared: bool,
    function: bool,
) -> None:
    config = PlaceConfig(grid=(4, 3), channels=3, heads=2, places=places)
    where: Any = (lambda pose: pose / 2) if function else "pose"
    model = encoder_host(config, where, share_weights=shared)
    pose = torch.rand(1 if one_row else rows, length, *[2] * (1 + by_head)) * 2 - 1
    x = tokens(rows, length)
    expected = by_hand(model, x, (pose / 2 if function else pose).expand(rows, *pose.shape[1:]))
    assert torch.equal(model(x, pose=pose), expected)
    assert not torch.allclose(model(x, pose=pose / 2), expected)  # -pose would be a mirror image


def test_an_argument_that_the_host_names_reaches_the_host_too() -> None:
    class Posed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.embed = encoder(), nn.Linear(2, WIDTH)

        def forward(self, x: Tensor, pose: Tensor) -> Tensor:
            return self.encoder(x + self.embed(pose))

    model, x, pose = Posed().double().eval(), tokens(), poses()
    bare = model(x, pose)
    attach(model, MAP, where="pose", gate_init=2.0)
    assert torch.equal(model(x, pose), model(x, pose=pose))
    assert not torch.equal(model(x, pose), bare)
    with memory_disabled(model):
        assert torch.equal(model(x, pose=pose), bare)


def test_an_argument_that_the_host_does_not_know_is_taken_out() -> None:
    model, x, pose = encoder().double().eval(), tokens(), poses()
    attach(model, MAP, where="pose")
    with memory_disabled(model):
        with memory_disabled(model):
            bare = model(x, pose=pose)
        assert torch.equal(model(x, pose=pose), bare)
    assert not torch.equal(model(x, pose=pose), bare)
    detach(model)
    with pytest.raises(TypeError, match="unexpected keyword argument 'pose'"):
        model(x, pose=pose)


def test_an_argument_that_a_wrapper_hands_on_is_not_taken_out() -> None:
    """PEFT names no argument of the model inside; a pose is known to neither."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(llama(), config).double().eval()
    ids, far = torch.arange(7)[None] + 1, torch.arange(0, 21, 3)[None]
    pose = torch.ones(1, 7, 1, dtype=torch.float64)
    bare, near = model(ids, position_ids=far).logits, model(ids).logits
    assert not torch.equal(bare, near)
    where = lambda pose, position_ids: time(position_ids) * pose  # noqa: E731
    attachment = attach(model, LINE, where=where, zero_init=True)
    assert torch.equal(model(ids, position_ids=far, pose=pose).logits, bare)
    assert torch.equal(model(ids, pose=pose).logits, near)
    nn.init.normal_(attachment.memory.output.weight)
    with_memory = model(ids, position_ids=far, pose=pose).logits
    assert (with_memory - model(ids, position_ids=far, pose=pose / 2).logits).abs().max() > 1e-6


def test_position_ids_that_the_host_makes_itself_are_taken_from_the_blocks() -> None:
    model, ids = llama_host(), torch.randint(1, VOCABULARY, (2, 9))
    expected = model(ids, position_ids=torch.arange(9)[None]).logits
    assert_same(model(ids).logits, expected)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_equals_recomputation(beams: int) -> None:
    model = llama_host()
    ids, mask = torch.randint(1, VOCABULARY, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, num_beams=beams)
    made = model.generate(ids, attention_mask=mask, use_cache=True, **options)
    again = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(made, again)
    alone = model.generate(ids[1:, 3:], use_cache=True, **options)
    assert torch.equal(made[1:, 3:], alone)


def test_a_function_sees_the_cache_as_it_was_before_the_call() -> None:
    """A block lengthens it before its memory runs."""
    track = poses(1, 30)[..., :1]

    def ahead(input_ids: Tensor, past_key_values: Any = None) -> Tensor:
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        return track[:, start : start + input_ids.shape[1]]

    model = llama_host(ahead)
    ids = torch.randint(1, VOCABULARY, (2, 10))
    whole = model(ids).logits
    cache = transformers.DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache).logits for part in ids.split([4, 1, 5], 1)]
    assert_same(torch.cat(parts, 1), whole)


def test_places_of_a_whole_sequence_are_refused_for_a_step_of_it() -> None:
    model = llama_host("pose")
    ids, pose = torch.randint(1, VOCABULARY, (2, 9)), poses()[:, :9, :1]
    cache = model(ids, pose=pose).past_key_values
    with pytest.raises(ValueError, match=r"= \(2, 1, 1\).*got \(2, 9, 1\).*pick by position"):
        model(ids[:, :1], pose=pose, past_key_values=cache)


@given(length=st.integers(2, 10), data=st.data())
def test_cutting_a_stream_anywhere_changes_nothing(length: int, data: Any) -> None:
    class Steps(nn.Module):
        """No attention, so that the memory alone carries anything over a cut."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return functools.reduce(lambda h, block: block(h), self.blocks, x)

    model = Steps().double()
    attachment = attach(model, MAP, where="pose", layers="blocks.*", gate_init=2.0)
    x, pose = tokens(2, length), poses(2, length)
    whole = model(x, pose=pose)
    cut = data.draw(st.integers(1, length - 1))
    with attachment.stream():
        parts = [model(x[:, :cut], pose=pose[:, :cut]), model(x[:, cut:], pose=pose[:, cut:])]
    assert_same(torch.cat(parts, 1), whole)


def test_a_padded_row_gives_what_it_gives_alone_whatever_its_padding_says() -> None:
    model = encoder_host()
    x, pose, mask = tokens(), poses(), torch.ones(2, TOKENS, dtype=torch.bool)
    mask[1, -4:] = False
    pose[1, -4:] = torch.tensor([torch.nan, 1000.0], dtype=torch.float64)
    m = model(x, pose=pose, src_key_padding_mask=~mask)
    alone = model(x[1:, :-4], pose=pose[1:, :-4])
    assert_same(m[1:, :-4], alone)
    m[mask].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.tensor_memory.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_has_the_gradients_of_a_plain_one(reentrant: bool) -> None:
    model = llama_host(lambda pose, position_ids: time(position_ids) * pose)
    ids, gradients = torch.randint(1, VOCABULARY, (2, 9)), []
    start = poses()[:, :9, :1]
    model.train()
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        pose = start.clone().requires_grad_(not reentrant)
        model(ids, pose=pose, use_cache=False).logits.square().mean().backward()
        gradients.append([p.grad for p in model.tensor_memory.parameters()])
        gradients[-1] += [] if reentrant else [pose.grad]
        model.zero_grad()
    for one, other in zip(*gradients, strict=True):
        assert_same(other, one)


def test_one_tensor_at_two_places_cannot_be_told_apart_in_the_backward_pass() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = encoder().layers[0]

        def forward(self, x: Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    model, x = Checkpointed().double(), tokens().requires_grad_()
    attach(model, MAP, where="pose", layers="block")
    for again in (False, True):
        pose = poses()
        loss = model(x, pose=pose).sum() + model(x, pose=pose.clone() if again else -pose).sum()
        if again:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="one and the same tensor in several calls"):
                loss.backward()
        x = tokens().requires_grad_()


def test_a_checkpoint_around_the_host_says_what_is_gone() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore

    model = Around().double()
    attach(model, MAP, where="pose")
    loss = model(tokens().requires_grad_(), pose=poses()).sum()
    with pytest.raises(ValueError, match="checkpoint its blocks one by one"):
        loss.backward()


def patches(pixel_values: Tensor) -> Tensor:
    """The middle of every patch of an image, and the middle of the image for the class token."""
    rows, columns = (size // 4 for size in pixel_values.shape[-2:])
    y, x = (torch.arange(n) * 2 / n + 1 / n - 1 for n in (rows, columns))
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij"), -1).flip(-1)
    return torch.cat([torch.zeros(1, 2), grid.flatten(0, 1)])[None]


def test_patches_of_an_image_have_places() -> None:
    model, images = HOSTS["vit"](), HOSTS["vit"].example()
    weights = attach(model, MAP, where=patches, gate_init=2.0).state_dict()
    seen = model(images).last_hidden_state
    for places in (patches(images), patches(images).flip(1)):
        detach(model)
        attach(model, MAP, where=lambda places=places: places).load_state_dict(weights)
        same = torch.equal(model(images).last_hidden_state, seen)
        assert same == torch.equal(places, patches(images))


def test_a_copied_host_takes_places_as_the_first_does() -> None:
    model, x, pose = encoder_host(), tokens(), poses()
    expected = model(x, pose=pose)
    assert torch.equal(copy.deepcopy(model)(x, pose=pose), expected)


@pytest.mark.exhaustive
def test_a_compiled_host_takes_places_as_the_first_does() -> None:
    torch._dynamo.reset()
    for where in ("pose", lambda pose: pose * 1):
        model, x, pose = encoder_host(where=where), tokens(), poses()
        expected = model(x, pose=pose)
        compiled: Any = torch.compile(model, backend="eager")
        for _ in range(2):
            assert_same(compiled(x, pose=pose), expected)
        with memory_disabled(model):
            bare = model(x, pose=pose)
            assert_same(compiled(x, pose=pose), bare)


def test_a_host_with_given_places_stays_causal() -> None:
    model = llama_host()
    ids = torch.randint(1, VOCABULARY, (2, 12))
    assert not find_leak(model, ids)
    model, pose = llama_host("pose"), poses(2, 12)[..., :1]
    assert not find_leak(lambda tokens: model(tokens, pose=pose).logits, ids)


def test_a_saved_memory_says_that_its_places_are_given(tmp_path: Any) -> None:
    model, x, pose = encoder_host(), tokens(), poses()
    expected = model(x, pose=pose)
    save_memory(model, tmp_path)
    detach(model)
    attach(model, PlaceConfig(grid=(4, 3), channels=3, heads=2), gate_init=2.0)
    with pytest.raises(ValueError, match=r"places 'given' \(here 'learned'\).*and where="):
        load_memory(model, tmp_path)
    detach(model)
    attach(model, MAP, where="pose")
    load_memory(model, tmp_path)
    assert torch.equal(model(x, pose=pose), expected)


def test_what_cannot_be_a_source_of_places_is_refused() -> None:
    model = encoder()
    keys = list(model.state_dict())
    learned = PlaceConfig(grid=(4, 3), channels=3, heads=2)
    for config, where, error, match in (
        (MAP, None, ValueError, "where: expected the argument .* places='given', got None"),
        (learned, "pose", ValueError, "learns its places from the tokens, got 'pose'"),
        (None, "pose", ValueError, "learns its places from the tokens"),
        (MAP, 3, TypeError, "where: expected the name of an argument .*got 3"),
        (MAP, "a pose", TypeError, "where: expected the name of an argument .*got 'a pose'"),
        (MAP, lambda *all_of_it: None, TypeError, "parameters are named like arguments"),
        (MAP, torch.tanh, TypeError, "parameters are named like arguments"),
    ):
        with pytest.raises(error, match=match):
            attach(model, config, where=where)
        assert list(model.state_dict()) == keys
        assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("pose", "error", "match"),
    [
        (None, ValueError, r"expected the argument 'pose' in the call of the host, got none"),
        ([0.5], TypeError, r"expected a tensor of places from the argument 'pose', got list"),
        (torch.zeros(2, 5, 2).long(), TypeError, r"got torch.int64; scale them with a function"),
        (torch.zeros(2, 5, 3), ValueError, r"\(B, N, n\) = \(2, 5, 2\).*got \(2, 5, 3\)"),
        (torch.zeros(2, 4, 2), ValueError, r"got \(2, 4, 2\); give one place per token"),
        (torch.zeros(5, 2), ValueError, r"got \(5, 2\)"),
        (torch.full((2, 5, 2), 37.0), ValueError, r"got 37 \(row 0, token 0, coordinate 0\)"),
        (torch.full((2, 5, 2), torch.nan), ValueError, r"in \[-1, 1\].*got nan.*; mask tokens"),
    ],
)
def test_places_that_do_not_fit_the_tokens_are_refused(pose: Any, error: Any, match: str) -> None:
    model, x = encoder_host(), tokens(2, 5)
    with pytest.raises(error, match=match):
        model(x, pose=pose)
    fits = poses(2, 5)  # and the next call is none the worse
    assert torch.equal(model(x, pose=fits), by_hand(model, x, fits))


def test_an_axis_that_wraps_takes_any_number() -> None:
    """Coordinate 0 belongs to the last axis of the grid."""
    config = PlaceConfig.map(2, grid=(4, 3), channels=3, heads=2, wrap=(False, True))
    model, x, pose = encoder_host(config), tokens(), poses()
    turn = torch.tensor([3.0, 0.0])  # three voxels of width 1 are a turn
    assert_same(model(x, pose=pose + turn), model(x, pose=pose))
    with pytest.raises(ValueError, match="coordinate 1"):
        model(x, pose=pose + turn.flip(0))

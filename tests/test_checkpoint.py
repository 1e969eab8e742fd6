"""The memory saved alone: strict on what comes back, and nothing changed by what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tensor_memory import MemoryConfig, attach, load_memory, save_memory
from tensor_memory.files import save_tensors

CONFIG = MemoryConfig(channels=4, grid=(3, 3), chunk_size=2)


def host(width: int = 16, layers: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 2, 24, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def attached(
    config: MemoryConfig = CONFIG, *, width: int = 16, host_layers: int = 2, **options: Any
) -> Any:
    model = host(width, host_layers)
    attach(model, config, **options)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_memory(attached(), tmp_path)
    return tmp_path


def refused(model: nn.Module, folder: Path, error: type[Exception], match: str) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=match):
        load_memory(model, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_come_back_exactly_and_the_host_is_not_in_the_file(tmp_path: Path) -> None:
    first, second = attached(), attached()
    save_memory(first, tmp_path / "new" / "folder")
    weights = load_file(tmp_path / "new" / "folder" / "memory.safetensors")
    assert set(weights) == set(first.tensor_memory.state_dict())
    load_memory(second, tmp_path / "new" / "folder")
    for name, tensor in first.tensor_memory.state_dict().items():
        assert torch.equal(second.tensor_memory.state_dict()[name], tensor)


def test_the_description_holds_the_config(saved: Path) -> None:
    described = json.loads((saved / "memory.json").read_text())
    assert MemoryConfig.from_dict(described["config"]) == CONFIG
    assert described["blocks"] == ["layers.0", "layers.1"]
    assert described["widths"] == [16, 16]


def without_description(path: Path) -> None:
    """Make a file of weights one that was written before it held a description."""
    save_tensors(path, load_file(path), kind="tensor-memory weights")


def test_a_memory_saved_before_a_field_was_there_is_loaded(saved: Path) -> None:
    described = json.loads((saved / "memory.json").read_text())
    del described["config"]["input_bias"]
    (saved / "memory.json").write_text(json.dumps(described))
    without_description(saved / "memory.safetensors")
    model = attached()
    load_memory(model, saved)
    weights = load_file(saved / "memory.safetensors")
    assert torch.equal(
        model.tensor_memory.state_dict()["memory.mix.bias"], weights["memory.mix.bias"]
    )


def test_a_memory_without_a_host_is_neither_saved_nor_loaded(saved: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^save_memory: expected .* got TransformerEncoder .*; call at"
    ):
        save_memory(host(), saved)
    with pytest.raises(
        ValueError, match=r"^load_memory: expected .* got TransformerEncoder .*; call at"
    ):
        load_memory(host(), saved)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here already")
    with pytest.raises(NotADirectoryError, match=r"expected the name of a folder, got a file; a"):
        save_memory(attached(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "here already"


@pytest.mark.parametrize("now", [CONFIG, replace(CONFIG, sigma_scale=2.0)], ids=["old", "new"])
def test_a_save_cut_short_between_its_two_files_is_refused(
    saved: Path, now: MemoryConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tensor_memory.checkpoint.write_text", crash)
    with pytest.raises(KeyboardInterrupt):
        save_memory(attached(replace(CONFIG, sigma_scale=2.0)), saved)
    match = (
        r"weights saved with the description beside them, got those of another save; .*: save again"
    )
    refused(attached(now), saved, ValueError, match)


@pytest.mark.parametrize("name", ["memory.safetensors", "memory.json"])
def test_a_truncated_file_is_an_error(saved: Path, name: str) -> None:
    whole = (saved / name).read_bytes()
    (saved / name).write_bytes(whole[: len(whole) // 2])
    refused(attached(), saved, ValueError, f"{name}: expected .* got a truncated or foreign file")


def test_a_changed_byte_of_the_weights_is_found(saved: Path) -> None:
    content = bytearray((saved / "memory.safetensors").read_bytes())
    content[-5] ^= 4
    (saved / "memory.safetensors").write_bytes(content)
    refused(attached(), saved, ValueError, r"expected what was written, got other content: a dam")


def test_json_of_something_else_is_an_error_that_says_what_to_do(saved: Path) -> None:
    for text in ("[]", "{}", '{"format": 1}'):
        (saved / "memory.json").write_text(text)
        refused(attached(), saved, ValueError, r"memory\.json: expected .*; save again$")


def test_another_config_is_named_but_how_it_is_computed_may_differ(saved: Path) -> None:
    other = MemoryConfig(channels=8, grid=(3, 3), chunk_size=2)
    refused(
        attached(other),
        saved,
        ValueError,
        r"this model's config, got one with channels 4 \(here 8\); attach",
    )
    for how in ({"backend": "reference"}, {"checkpoint_every": 4}):
        load_memory(attached(MemoryConfig(channels=4, grid=(3, 3), chunk_size=2, **how)), saved)


def test_another_number_of_layers_is_an_error_when_each_has_its_own(tmp_path: Path) -> None:
    save_memory(attached(share_weights=False), tmp_path)
    refused(
        attached(host_layers=3, share_weights=False),
        tmp_path,
        ValueError,
        r"expected 3 memory layers .*\), got 2 \(layers\.0, layers\.1\); attach to as many",
    )


def test_saving_over_an_older_memory_leaves_no_temporary_files(saved: Path) -> None:
    save_memory(attached(), saved)
    assert sorted(path.name for path in saved.iterdir()) == ["memory.json", "memory.safetensors"]


def test_a_memory_saved_in_float32_loads_into_a_host_in_half_precision(saved: Path) -> None:
    model = host().bfloat16()
    attach(model, CONFIG)
    load_memory(model, saved)
    assert model.tensor_memory.memory.taps.dtype == torch.bfloat16


def test_a_memory_of_other_blocks_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    first = attached(layers=["layers.0", "layers.1"], host_layers=4, share_weights=False)
    save_memory(first, tmp_path)
    for layers in (["layers.2", "layers.3"], ["layers.1", "layers.0"]):
        model = attached(layers=layers, host_layers=4, share_weights=False)
        match = (
            rf"blocks {layers[0]}, {layers[1]} of .* for layers\.0, layers\.1; .* same_blocks=False"
        )
        refused(model, tmp_path, ValueError, match)
        load_memory(model, tmp_path, same_blocks=False)
        for name, tensor in first.tensor_memory.state_dict().items():
            assert torch.equal(model.tensor_memory.state_dict()[name], tensor)


def test_weights_of_another_kind_are_told_in_plain_words(saved: Path) -> None:
    path = saved / "memory.safetensors"
    save_file(load_file(path), path, metadata={"kind": "photos"})
    refused(attached(), saved, ValueError, "expected tensor-memory weights, got a file of kind 'ph")


def renamed(weights: dict[str, torch.Tensor]) -> None:
    weights["layers.0.bias"] = weights.pop("layers.0.gate")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (renamed, r"unknown tensors layers\.0\.bias, missing tensors layers\.0\.gate"),
        (
            lambda weights: weights.pop("layers.0.gate"),
            r"unknown tensors none, missing tensors layers\.0\.gate",
        ),
        (
            lambda weights: weights.update({"memory.taps": weights["memory.taps"][:1]}),
            r"expected memory\.taps of shape \(2, 8, 3\), got \(1, 8, 3\)",
        ),
        (
            lambda weights: weights.update({"memory.taps": weights["memory.taps"].cfloat()}),
            r"expected memory\.taps of a type that fits torch\.float32, got torch\.complex64",
        ),
    ],
    ids=["renamed", "missing", "shape", "complex"],
)
def test_a_tensor_that_does_not_fit_is_named(saved: Path, change: Any, match: str) -> None:
    weights = load_file(saved / "memory.safetensors")
    change(weights)
    path = saved / "memory.safetensors"
    save_tensors(path, weights, kind="tensor-memory weights")
    refused(attached(), saved, ValueError, match)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"width": 8}, "hosts of width 8 like this model, got one for width 16"),
        ({"host_layers": 3}, "expected 3 memory layers as in this model .* got 2"),
        ({"share_weights": False}, "attach with share_weights=True"),
        ({"scope": "depth", "causal": False}, "attach with scope='layer'"),
        ({"norm": False}, r"unknown tensors layers\.0\.norm"),
    ],
)
def test_a_memory_attached_in_another_way_is_refused(
    saved: Path, options: dict[str, Any], match: str
) -> None:
    refused(attached(**options), saved, ValueError, match)


@pytest.mark.parametrize("name", ["memory.json", "memory.safetensors"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    refused(attached(), saved, FileNotFoundError, rf"{name}: .*no such file")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"extra": 1}, "expected the keys format, config, .* got .*extra"),
        ({"format": 2}, "expected format 1, got 2; it was written by another version"),
        ({"config": CONFIG.to_dict() | {"colour": 1}}, "unknown field colour"),
        ({"widths": None}, r"memory\.json: expected widths to be a list of integers, got None"),
        ({"widths": ["16"]}, "expected widths to be a list of integers"),
        ({"widths": [True, True]}, r"expected widths to be a list of integers, got \[True, True\]"),
        ({"blocks": []}, r"expected blocks to be a list of module paths, got \[\]; save again"),
        ({"blocks": 3}, "expected blocks to be a list of module paths, got 3"),
        ({"config": []}, r"expected config to be an object of config fields, .*, got \[\]"),
        ({"config": [{}]}, r"expected a config for each of 2 layers, got 1; save again"),
        ({"config": {"channels": "a"}}, r"expected the fields of a MemoryConfig, got .*channels"),
        ({"share_weights": "yes"}, "expected share_weights to be true or false, .*, got 'yes'"),
        ({"scope": None}, "expected scope to be 'layer' or 'depth', got None"),
    ],
)
def test_a_malformed_description_is_an_error(
    saved: Path, change: dict[str, Any], match: str
) -> None:
    path = saved / "memory.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    without_description(saved / "memory.safetensors")
    refused(attached(), saved, ValueError, match)

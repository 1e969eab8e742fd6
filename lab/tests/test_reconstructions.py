"""Reconstructions as pictures: what is pasted, what is a model's, in which column."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from reconstructions import main, picture, reconstruct
from tensor_memory import MemoryConfig
from tensor_memory_lab.models.image import ImageModelConfig
from tensor_memory_lab.recipes.images import cub
from tensor_memory_lab.recipes.video import ucf101_nine
from tensor_memory_lab.run_config import BudgetConfig
from tensor_memory_lab.tasks.masked_images import MaskedImagesConfig
from tensor_memory_lab.train import RunOptions, train
from vision_data import tiny_actions, tiny_birds


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return replace(
        cub(),
        task=MaskedImagesConfig(**tiny_birds(tmp_path_factory.mktemp("birds"))),
        model=ImageModelConfig(
            dim=16,
            heads=2,
            decoder_dim=8,
            decoder_heads=2,
            memory=MemoryConfig(channels=4, grid=(3, 3, 3), chunk_size=2),
        ),
        budget=BudgetConfig(steps=1, batch_size=4, evaluate_every=1, checkpoint_every=1),
        precision="float32",
    )


def test_columns_are_input_masked_methods_target(config):
    task = config.task.build(0)
    models = {m: replace(config.model, method=m).build(task) for m in ("base", "spatial")}
    columns = reconstruct(task, models, rows=3)
    assert list(columns) == ["input", "masked", "base", "spatial", "target"]
    assert task.batches("test@75%", 1) == 6
    hidden = task.hidden(task.batch("test@75%", 0, 6)["visible"][::2])  # spread over the split
    for name, column in columns.items():
        assert column.shape == (3, 3, 32, 32)
        seen = column.movedim(1, -1)[~hidden]
        assert torch.equal(seen, columns["target"].movedim(1, -1)[~hidden]), name
    assert (columns["masked"].movedim(1, -1)[hidden] == 0.5).all()
    drawn = picture(columns, scale=2)
    assert drawn.size == (5 * 66 - 2, 14 + 3 * 66 - 2)
    corner = torch.tensor(drawn.getpixel((0, 14)))
    assert torch.equal(corner, (columns["input"][0, :, 0, 0] * 255).round().long())


def test_the_command_draws_finished_runs(config, tmp_path, capsys):
    for method in ("base", "spatial"):
        run = replace(config, model=replace(config.model, method=method))
        train(run, RunOptions(tmp_path / method, quiet=True))
    output = tmp_path / "figures" / "birds.png"
    runs = [str(tmp_path / "base"), str(tmp_path / "spatial")]
    assert main([*runs, "--output", str(output), "--rows", "2"]) == 0
    assert "input, masked, base, spatial, target" in capsys.readouterr().out
    with Image.open(output) as image:
        assert image.size == (5 * 34 - 2, 14 + 2 * 34 - 2)
    with pytest.raises(SystemExit):
        main([runs[0], runs[0], "--output", str(output)])
    assert "differ in more than their seed, got base again" in capsys.readouterr().err
    for wrong, said in (
        (["--rows", "0"], "--rows: expected 1 to 6, the images of test@75%, got 0"),
        (["--rows", "7"], "--rows: expected 1 to 6"),  # else one would be shown twice
        (["--scale", "0"], "--scale: expected 1 or more, got 0"),
        (["--output", str(output.parent)], "is a folder; expected the name of a file"),
    ):
        with pytest.raises(SystemExit):
            main([runs[0], "--output", str(output), *wrong])
        assert said in capsys.readouterr().err


def test_a_run_of_another_kind_is_refused(tmp_path, capsys):
    made = ucf101_nine()
    small = {"dim": 16, "heads": 2, "layers": 1, "method": "frames"}
    config = replace(
        made,
        task=replace(made.task, **tiny_actions(tmp_path, 2)),
        model=replace(made.model, **small),
        budget=BudgetConfig(steps=1, batch_size=2, evaluate_every=1, checkpoint_every=1),
        precision="float32",
    )
    train(config, RunOptions(tmp_path / "run", quiet=True))
    with pytest.raises(SystemExit):
        main([str(tmp_path / "run")])
    said = "expected a run of masked reconstruction, got one of ucf"
    assert said in capsys.readouterr().err

"""Reconstructions as pictures: what is pasted, what is a model's, in which column."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from reconstructions import draw, main, reconstruct
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


def test_columns_are_what_is_shown_the_methods_and_the_photo(config):
    task = config.task.build(0)
    models = {m: replace(config.model, method=m).build(task) for m in ("base", "spatial")}
    columns = reconstruct(task, models, rows=3)
    assert list(columns) == ["shown", "base", "spatial", "photo"]
    assert task.batches("test@75%", 1) == 6
    hidden = task.hidden(task.batch("test@75%", 0, 6)["visible"][::2])  # spread over the split
    for name, column in columns.items():
        assert column.shape == (3, 3, 32, 32)
        seen = column.movedim(1, -1)[~hidden]
        assert torch.equal(seen, columns["photo"].movedim(1, -1)[~hidden]), name
    assert (columns["shown"].movedim(1, -1)[hidden] == 0.5).all()


def test_each_picture_is_in_its_column_and_row(tmp_path):
    colours = {"left": [(1, 0, 0), (0, 1, 0)], "right": [(0, 0, 1), (1, 1, 0)]}
    columns = {
        k: torch.tensor(v).float()[:, :, None, None].expand(2, 3, 4, 4) for k, v in colours.items()
    }
    draw(columns, tmp_path / "four.png", "light")
    with Image.open(tmp_path / "four.png") as image:
        for x, pair in zip((0.25, 0.75), colours.values(), strict=True):
            for y, colour in zip((0.3, 0.8), pair, strict=True):
                at = (int(x * image.width), int(y * image.height))
                assert image.convert("RGB").getpixel(at) == tuple(255 * c for c in colour)


def test_the_command_draws_finished_runs(config, tmp_path, capsys):
    for method in ("base", "spatial"):
        run = replace(config, model=replace(config.model, method=method))
        train(run, RunOptions(tmp_path / method, quiet=True))
    output = tmp_path / "figures"
    runs = [str(tmp_path / "base"), str(tmp_path / "spatial")]
    assert main([*runs, "--output", str(output), "--rows", "2"]) == 0
    assert "shown, base, spatial, photo" in capsys.readouterr().out
    papers = {"light": 255, "dark": 21}
    for theme, paper in papers.items():
        with Image.open(output / f"vision-reconstructions-{theme}.png") as image:
            assert image.width == 1080  # as every figure
            assert image.convert("RGB").getpixel((1079, 0))[0] == paper
    with pytest.raises(SystemExit):
        main([runs[0], runs[0], "--output", str(output)])
    assert "differ in more than their seed, got base again" in capsys.readouterr().err
    for wrong, said in (
        (["--rows", "0"], "--rows: expected 1 to 6, the images of test@75%, got 0"),
        (["--rows", "7"], "--rows: expected 1 to 6"),  # else one would be shown twice
        (["--output", str(tmp_path / "base" / "config.json")], "File exists"),
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

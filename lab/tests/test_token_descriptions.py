"""Tasks say what their tokens are, for whoever looks inside a model that reads them."""

import pytest
import torch

from tensor_memory_lab.tasks import Describes
from tensor_memory_lab.tasks.binding import BindingConfig
from tensor_memory_lab.tasks.dice import DiceConfig
from tensor_memory_lab.tasks.language import LanguageTask, LanguageTaskConfig
from tensor_memory_lab.tasks.map_building import MapConfig
from tensor_memory_lab.tasks.masked_images import MaskedImagesConfig
from tensor_memory_lab.tasks.no_harm import NoHarmConfig
from tensor_memory_lab.tasks.occlusion import OcclusionConfig
from tensor_memory_lab.tasks.text import Corpus, Vocabulary
from vision_data import write_cub


def test_binding_says_what_is_where_and_what_is_asked():
    batch = {
        "kind": torch.tensor([[0, 2, 1]]),
        "place": torch.tensor([[[0.5, -0.25, 1.0], [0.0, 0.0, 0.0], [0.5, -0.25, 1.0]]]),
        "value": torch.tensor([[7, 0, 0]]),
    }
    assert BindingConfig().build(0).describe(batch) == {
        "texts": [["7 at (+0.5, -0.2, +1.0); ", "pause; ", "what is at (+0.5, -0.2, +1.0)? "]]
    }


def test_map_building_says_patches_and_cells():
    task = MapConfig(observations=2, gap=1).build(0)
    batch = task.batch("test", 0, 3)
    texts = task.describe(batch)["texts"]
    assert [len(row) for row in texts] == [4, 4, 4]
    assert [row[2] for row in texts] == ["pause; "] * 3
    patch, asked = texts[1][0], texts[1][3]
    cells, place = patch.removesuffix("; ").split(" at ")
    bits = [int(bit) for bit in cells.replace("/", "")]
    assert bits == batch["features"][1, 0, :4].int().tolist()
    down, across = (int(part.split()[-1]) for part in place.split(","))
    where = torch.tensor([down, across]) * (2 / 7) - 1
    torch.testing.assert_close(where, batch["features"][1, 0, 4:6])
    assert asked.startswith("row ")
    assert asked.endswith("? ")


def test_symbols_and_throws_are_numbers():
    batch = {"symbols": torch.tensor([[3, 11]])}
    assert NoHarmConfig().build(0).describe(batch) == {"texts": [["3 ", "11 "]]}
    batch = {"ids": torch.tensor([[6, 0, 5]])}
    assert DiceConfig().build(0).describe(batch) == {"texts": [["start ", "1 ", "6 "]]}


@pytest.mark.parametrize("level", ["word", "byte"])
def test_the_texts_of_a_language_batch_read_as_the_text(level):
    words = Vocabulary() if level == "byte" else Vocabulary(("<eos>", "a", "b", "<unk>"))
    said = "a b\na" if level == "byte" else " a b\n a"
    ids = torch.tensor([list(b"a b\na") if level == "byte" else [1, 2, 0, 1]])
    splits = {split: ids[0].int() for split in ("train", "valid", "test")}
    task = LanguageTask(LanguageTaskConfig(corpus="any"), Corpus(words, splits), 0)
    (row,) = task.describe({"ids": ids})["texts"]
    assert len(row) == ids.shape[1]
    assert "".join(row) == said


def test_frames_of_a_box_are_grey_pictures():
    task = OcclusionConfig(frames=3, hidden=1).build(0)
    batch = task.batch("test", 0, 2)
    described = task.describe(batch)
    assert described["frames"].shape == (2, 3, 16, 16, 3)
    assert described["frames"].dtype == torch.uint8
    assert described["frames"][0, 2].unique().tolist() == [128]  # behind the occluder
    brightest = described["frames"][..., 1].flatten(2).argmax(2)
    assert torch.equal(brightest[:, 0], batch["frames"][:, 0].flatten(1).argmax(1))
    assert described["tokens_per_frame"] * 3 == task.length


def test_hidden_patches_of_an_image_are_grey_and_the_others_as_they_are(tmp_path):
    data = write_cub(tmp_path / "data", per_class=9)
    config = MaskedImagesConfig(
        data_dir=str(data), cache_dir=str(tmp_path / "cache"), side=40, crop=32, patch=8
    )
    task = config.build(0)
    batch = task.batch("test@50%", 0, 2)
    described = task.describe(batch)
    frames, hidden = described["frames"][:, 0], task.hidden(batch["visible"])
    assert (frames[hidden] == 128).all()
    whole = task.images(batch["patches"]).permute(0, 2, 3, 1) * 255
    torch.testing.assert_close(frames[~hidden].float(), whole[~hidden], rtol=0, atol=0.51)
    assert described["tokens_per_frame"] == 1 + 8
    assert isinstance(task, Describes)

"""CUB and plain folders: lists, splits, decoding once, crops where the pixels lie."""

import io
import json
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from tensor_memory_lab.tasks import images as images_module
from tensor_memory_lab.tasks.decoded_cache import CacheWriter, Wanted
from tensor_memory_lab.tasks.image_files import (
    Source,
    chosen_by_hash,
    cub_images,
    folder_images,
    split_images,
)
from tensor_memory_lab.tasks.images import (
    centre,
    decode_image,
    decode_images,
    load_images,
)
from tensor_memory_lab.tasks.masked_images import MaskedImagesConfig
from vision_data import write_cub, zipped


@pytest.fixture(scope="module")
def cub(tmp_path_factory):
    return write_cub(tmp_path_factory.mktemp("cub"))


def test_the_official_lists_give_labels_and_split(cub):
    images = cub_images(Source(cub))
    assert [image.label for image in images] == [0] * 6 + [1] * 6
    assert [image.train for image in images] == [False, True, True] * 4
    assert images[0].path == "CUB_200_2011/images/001.Bird_1/Bird_0001.jpg"


def test_the_folder_that_holds_the_lists_serves_as_well_and_names_images_alike(cub):
    """Masks and validation are made of ids: they may not depend on which folder was named."""
    outer, inner = cub_images(Source(cub)), cub_images(Source(cub / "CUB_200_2011"))
    assert [image.id for image in outer] == [image.id for image in inner]
    assert inner[0].id == "001.Bird_1/Bird_0001.jpg"
    assert inner[0].path == "images/001.Bird_1/Bird_0001.jpg"


def test_a_zip_serves_like_the_folder(cub, tmp_path):
    archive = Source(zipped(cub, tmp_path / "cub.zip"))
    assert cub_images(archive) == cub_images(Source(cub))
    name = cub_images(archive)[3].path
    assert np.array_equal(decode_image(archive, name, 32), decode_image(Source(cub), name, 32))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_zip_is_told_by_the_file_in_it(cub, tmp_path, compression):
    path = zipped(cub, tmp_path / "cub.zip", compression)
    with zipfile.ZipFile(path) as archive:
        image = next(info for info in archive.infolist() if info.filename.endswith(".jpg"))
    content = bytearray(path.read_bytes())
    inside = image.header_offset + 30 + len(image.filename) + image.compress_size // 2
    content[inside : inside + 8] = bytes(8)
    path.write_bytes(content)
    source = Source(path)
    with pytest.raises(ValueError, match=rf"{image.filename}: expected a .zip that is whole"):
        load_images(source, cub_images(source), side=40, cache=tmp_path / "cache")
    directory = content.rfind(b"PK\x01\x02")
    content[directory : directory + 4] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cub.zip: expected a .zip that is whole"):
        Source(path)


def test_validation_is_held_out_of_train_by_id(cub):
    images = cub_images(Source(cub))
    splits = split_images(images, valid_fraction=0.25)
    sizes = {name: len(part) for name, part in splits.items()}
    assert sizes == {"train": 6, "valid": 2, "test": 4}
    ids = [image.id for part in splits.values() for image in part]
    assert len(ids) == len(set(ids)) == 12
    again = split_images(images[::-1], valid_fraction=0.25)
    assert {i.id for i in splits["valid"]} == {i.id for i in again["valid"]}
    assert not any(image.train for image in splits["test"])
    assert all(image.train for image in splits["valid"])


@pytest.mark.parametrize("fraction", [0, 1, 1.5])
def test_a_fraction_that_leaves_nothing_is_refused(fraction):
    with pytest.raises(ValueError, match="expected a number between 0 and 1"):
        chosen_by_hash(["a", "b"], fraction, salt="")


def test_a_missing_folder_is_named_and_told_the_layout(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"birds: expected a folder .* <class>/<name>\.jpg"):
        Source(tmp_path / "birds")
    config = MaskedImagesConfig(data_dir=str(tmp_path / "birds"))
    with pytest.raises(FileNotFoundError, match=r"birds: .* CUB_200_2011/\{images\.txt, train_"):
        config.build(0)


def test_a_folder_without_the_lists_is_told_the_layout(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"images\.txt: not there; .* CUB_200_2011/\{im"):
        cub_images(Source(tmp_path))


@pytest.mark.parametrize("name", ["train_test_split", "image_class_labels"])
def test_a_missing_list_is_named(tmp_path, name):
    folder = write_cub(tmp_path)
    (folder / "CUB_200_2011" / f"{name}.txt").unlink()
    with pytest.raises(FileNotFoundError, match=rf"{name}\.txt: not there; expected CUB-200-2011"):
        cub_images(Source(folder))


def test_a_missing_image_is_named_and_counted(tmp_path):
    folder = write_cub(tmp_path)
    (folder / "CUB_200_2011/images/002.Bird_2/Bird_0008.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"Bird_0008\.jpg: listed .*\(1 of 12 images"):
        cub_images(Source(folder))


def test_lists_of_different_archives_are_refused(tmp_path):
    folder = write_cub(tmp_path)
    path = folder / "CUB_200_2011" / "image_class_labels.txt"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(ValueError, match=r"image 12 of images\.txt is missing"):
        cub_images(Source(folder))


def test_class_folders_are_classes_and_a_flat_folder_is_one(tmp_path):
    for name in ("rose/a.png", "rose/b.png", "daisy/c.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name, format="png")
    images = folder_images(Source(tmp_path), test_fraction=0.34)
    assert {image.id: image.label for image in images} == {
        "daisy/c.png": 0,
        "rose/a.png": 1,
        "rose/b.png": 1,
    }
    assert sum(not image.train for image in images) == 1
    assert [i.label for i in folder_images(Source(tmp_path / "rose"), test_fraction=0.5)] == [0, 0]


def test_a_folder_without_images_is_told_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no image found; expected <class>/<name>\.jpg"):
        folder_images(Source(tmp_path))


@pytest.fixture
def store(cub, tmp_path):
    source = Source(cub)
    return load_images(source, cub_images(source), side=40, cache=tmp_path)


def test_images_keep_their_shape_with_the_short_side_as_asked(store):
    assert store.height.tolist()[:3] == [48, 40, 40]
    assert store.width.tolist()[:3] == [40, 40, 52]
    assert store.pixels.dtype == torch.uint8
    assert len(store.pixels) == int((store.height * store.width).sum())


def test_any_image_size_is_made(cub, tmp_path):
    source = Source(cub)
    store = load_images(source, cub_images(source), side=20, cache=tmp_path)
    assert torch.minimum(store.height, store.width).eq(20).all()


def test_a_centre_crop_is_the_middle_of_the_decoded_file(cub, store):
    source = Source(cub)
    for row in range(3):
        name = cub_images(source)[row].path
        whole = torch.from_numpy(decode_image(source, name, 40).copy())
        top, left = (whole.shape[0] - 32 + 1) // 2, (whole.shape[1] - 32 + 1) // 2
        at, flip = centre(1)
        crop = store.crops(torch.tensor([row]), 32, at, flip)
        assert torch.equal(crop[0].permute(1, 2, 0), whole[top : top + 32, left : left + 32])


def test_crops_reach_every_corner_and_mirror(store):
    rows = torch.tensor([2, 2, 2])  # 40 x 52 pixels
    corners = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    flips = torch.tensor([False, False, True])
    first, last, mirrored = store.crops(rows, 30, corners, flips)
    start = int(store.start[2])
    whole = store.pixels[start : start + 40 * 52].reshape(40, 52, 3).permute(2, 0, 1)
    assert torch.equal(first, whole[:, :30, :30])
    assert torch.equal(last, whole[:, -30:, -30:])
    assert torch.equal(mirrored, first.flip(-1))


def test_the_second_load_reads_the_cache_and_not_the_images(cub, tmp_path, monkeypatch):
    source = Source(cub)
    images = cub_images(source)
    first = load_images(source, images, side=32, cache=tmp_path)
    monkeypatch.delattr("tensor_memory_lab.tasks.images.decode_image")
    second = load_images(source, images, side=32, cache=tmp_path)
    assert torch.equal(first.pixels, second.pixels)
    assert first.row == second.row


def test_other_sizes_and_other_subsets_get_caches_of_their_own(cub, tmp_path):
    source = Source(cub)
    images = cub_images(source)
    load_images(source, images, side=32, cache=tmp_path)
    load_images(source, images, side=24, cache=tmp_path)
    load_images(source, images[:5], side=24, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_broken_image_is_an_error_that_leaves_no_cache(tmp_path):
    folder, cache = write_cub(tmp_path / "data"), tmp_path / "cache"
    (folder / "CUB_200_2011/images/001.Bird_1/Bird_0002.jpg").write_bytes(b"no picture")
    source = Source(folder)
    with pytest.raises(ValueError, match=r"Bird_0002\.jpg: expected an image, but it cannot be"):
        load_images(source, cub_images(source), side=32, cache=cache)
    assert list(cache.iterdir()) == []


def cut_pixels(cache):
    path = next(cache.glob("*/pixels.npy"))
    path.write_bytes(path.read_bytes()[:-7])


def lose_description(cache):
    next(cache.glob("*/cache.json")).unlink()


def garble_description(cache):
    next(cache.glob("*/cache.json")).write_text("{")


def swap_files(cache):
    path = next(cache.glob("*/cache.json"))
    described = json.loads(path.read_text())
    described["files"].reverse()
    path.write_text(json.dumps(described))


def lose_pixels(cache):
    next(cache.glob("*/pixels.npy")).unlink()


def other_pixels(cache):
    np.save(next(cache.glob("*/pixels.npy")), np.zeros((3, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (cut_pixels, "pixels.npy cannot be mapped"),
        (lose_description, "cache.json is missing"),
        (garble_description, r"cache\.json: expected the description of a cache .* as JSON"),
        (swap_files, "its files differs"),
        (lose_pixels, "pixels.npy is missing"),
        (other_pixels, r"pixels.npy is uint8 \(3, 3\), not uint8"),
    ],
)
def test_a_damaged_cache_is_refused_and_names_the_cure(cub, tmp_path, damage, complaint):
    source = Source(cub)
    load_images(source, cub_images(source), side=24, cache=tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=f"{complaint}.*delete .* to decode again"):
        load_images(source, cub_images(source), side=24, cache=tmp_path)


def test_a_cache_of_files_that_changed_is_refused(tmp_path):
    folder, cache = write_cub(tmp_path / "data"), tmp_path / "cache"
    load_images(Source(folder), cub_images(Source(folder)), side=24, cache=cache)
    changed = folder / "CUB_200_2011/images/001.Bird_1/Bird_0002.jpg"
    Image.new("RGB", (90, 90)).save(changed)
    with pytest.raises(ValueError, match=r"decoded from a .*Bird_0002\.jpg of .* which now has"):
        load_images(Source(folder), cub_images(Source(folder)), side=24, cache=cache)


def test_two_who_decode_at_once_leave_one_cache(cub, tmp_path):
    source = Source(cub)
    images = cub_images(source)
    wanted = Wanted("images", {"short_side": 24}, [image.path for image in images])
    folder = wanted.folder(tmp_path)
    with CacheWriter(folder, wanted) as slower:
        pixels = slower.array("pixels", (1, 3))
        first = load_images(source, images, side=24, cache=tmp_path)
        slower.finish({"pixels": pixels}, {})
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert torch.equal(load_images(source, images, side=24, cache=tmp_path).pixels, first.pixels)


class Heard(io.StringIO):
    """A place to print to that knows at once whether some words were printed."""

    def __init__(self, words):
        super().__init__()
        self.words, self.event = words, threading.Event()

    def write(self, text):
        if self.words in text:
            self.event.set()
        return super().write(text)


def test_of_two_who_want_a_cache_one_decodes_and_the_other_waits(cub, tmp_path, monkeypatch):
    source, decoded = Source(cub), []
    begun, go_on = threading.Event(), threading.Event()
    said = Heard("another process is decoding, waiting for it")

    def slowly(*arguments, **options):
        decoded.append(arguments)
        begun.set()
        assert go_on.wait(120)
        decode_images(*arguments, **options)

    monkeypatch.setattr(images_module, "decode_images", slowly)
    monkeypatch.setattr(sys, "stderr", said)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load_images, source, cub_images(source), side=24, cache=tmp_path)
        assert begun.wait(120)
        second = pool.submit(load_images, source, cub_images(source), side=24, cache=tmp_path)
        waited = said.event.wait(60)
        go_on.set()
        assert torch.equal(first.result().pixels, second.result().pixels)
    assert waited
    assert len(decoded) == 1
    assert len(list(tmp_path.iterdir())) == 1  # nothing but the cache is left

"""CUB and plain folders: lists, splits, decoding once, crops where the pixels lie."""

import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from tensor_memory_lab.cli import main
from tensor_memory_lab.commands.run import run_command
from tensor_memory_lab.records import read_records
from tensor_memory_lab.tasks.images import (
    Source,
    chosen_by_hash,
    cub_images,
    decode_image,
    folder_images,
    from_patches,
    load_images,
    open_images,
    split_images,
    to_patches,
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
    assert inner[0].path == f"images/{inner[0].id}" == "images/001.Bird_1/Bird_0001.jpg"


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
    assert len({image.id for part in splits.values() for image in part}) == 12
    again = split_images(images[::-1], valid_fraction=0.25)
    assert {i.id for i in splits["valid"]} == {i.id for i in again["valid"]}
    assert all(image.train == (name != "test") for name, part in splits.items() for image in part)


@pytest.mark.parametrize("fraction", [0, 1, 1.5])
def test_a_fraction_that_leaves_nothing_is_refused(fraction):
    with pytest.raises(ValueError, match="expected a number between 0 and 1"):
        chosen_by_hash(["a", "b"], fraction, salt="")


def test_a_missing_folder_is_named_and_told_the_layout(tmp_path):
    config = MaskedImagesConfig(data_dir=str(tmp_path / "birds"))
    with pytest.raises(FileNotFoundError, match=r"birds: .* CUB_200_2011/\{images\.txt, train_"):
        config.build(0)
    with pytest.raises(FileNotFoundError, match=r"no image found; expected <class>/<name>\.jpg"):
        folder_images(Source(tmp_path))


@pytest.mark.parametrize("name", ["images", "train_test_split", "image_class_labels"])
def test_a_missing_list_is_named_with_the_layout(tmp_path, name):
    folder = write_cub(tmp_path)
    (folder / "CUB_200_2011" / f"{name}.txt").unlink()
    told = rf"{name}\.txt: not there; .* CUB_200_2011/\{{im.*--task\.layout folder"
    with pytest.raises(FileNotFoundError, match=told):
        cub_images(Source(folder))


def test_a_missing_image_is_named_and_counted(tmp_path):
    folder = write_cub(tmp_path)
    (folder / "CUB_200_2011/images/002.Bird_2/Bird_0008.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"Bird_0008\.jpg: listed .*\(1 of 12 images"):
        cub_images(Source(folder))


@pytest.mark.parametrize(
    ("last", "complaint"),
    [("", r"image 12 of images\.txt is missing"), ("12", "expected `<image id> <value>`.* '12'")],
)
def test_lists_that_do_not_fit_together_are_refused(tmp_path, last, complaint):
    folder = write_cub(tmp_path)
    path = folder / "CUB_200_2011" / "image_class_labels.txt"
    path.write_text("\n".join([*path.read_text().splitlines()[:-1], last]))
    with pytest.raises(ValueError, match=complaint):
        cub_images(Source(folder))


def test_class_folders_are_classes_and_a_flat_folder_is_one(tmp_path):
    for name in ("rose/a.png", "rose/b.png", "daisy/c.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name, format="png")
    images = folder_images(Source(tmp_path), test_fraction=0.34)
    labels = {image.id: image.label for image in images}
    assert labels == {"daisy/c.png": 0, "rose/a.png": 1, "rose/b.png": 1}
    assert sum(not image.train for image in images) == 1
    assert [i.label for i in folder_images(Source(tmp_path / "rose"), test_fraction=0.5)] == [0, 0]


def test_a_zip_is_split_like_its_folder_whether_it_holds_the_folder_or_what_is_in_it(tmp_path):
    ours = ("a.png", "b.png", "more/c.png", "more/d.png")
    for name in (*ours, "more/._c.png", "../__MACOSX/pics/._a.png"):  # what macOS puts beside them
        (tmp_path / "all/pics" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "all/pics" / name).write_bytes(b"")
    inside, around = tmp_path / "all/pics", tmp_path / "all"
    expected = {image.id: image.train for image in folder_images(Source(inside))}
    assert set(expected) == set(ours)
    for folder in (inside, around):
        images = folder_images(Source(zipped(folder, tmp_path / "pics.zip")))
        assert {image.id: image.train for image in images} == expected


@pytest.fixture
def store(cub, tmp_path):
    source = Source(cub)
    return load_images(source, cub_images(source), side=40, cache=tmp_path)


def test_images_keep_their_shape_with_the_short_side_as_asked(cub, store, tmp_path):
    assert store.height.tolist()[:3] == [48, 40, 40]
    assert store.width.tolist()[:3] == [40, 40, 52]
    assert store.pixels.dtype == torch.uint8
    assert len(store.pixels) == int((store.height * store.width).sum())
    small = load_images(Source(cub), cub_images(Source(cub)), side=20, cache=tmp_path)
    assert torch.minimum(small.height, small.width).eq(20).all()


def test_the_second_load_reads_the_cache_and_not_the_images(cub, store, tmp_path, monkeypatch):
    monkeypatch.delattr("tensor_memory_lab.tasks.images.decode_image")
    again = load_images(Source(cub), cub_images(Source(cub)), side=40, cache=tmp_path)
    assert torch.equal(store.pixels, again.pixels)
    assert store.row == again.row


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


def test_a_broken_image_is_an_error_that_leaves_no_cache(tmp_path):
    folder, cache = write_cub(tmp_path / "data"), tmp_path / "cache"
    (folder / "CUB_200_2011/images/001.Bird_1/Bird_0002.jpg").write_bytes(b"no picture")
    source = Source(folder)
    with pytest.raises(ValueError, match=r"Bird_0002\.jpg: expected an image, but it cannot be"):
        load_images(source, cub_images(source), side=32, cache=cache)
    assert list(cache.iterdir()) == []


def grey_folder(path, shade):
    path.mkdir(parents=True)
    for number in range(8):
        Image.new("RGB", (32, 32), (shade, number, 0)).save(path / f"{number}.bmp")
    return path


def test_folders_of_like_names_and_sizes_have_pixels_of_their_own(tmp_path):
    paths = [grey_folder(tmp_path / of / "photos", shade) for of, shade in (("a", 10), ("b", 200))]
    one, other = (open_images(path, "folder", side=16, cache=tmp_path / "c") for path in paths)
    assert one.name == other.name == "photos@16px"
    assert (int(one.store.pixels[0, 0]), int(other.store.pixels[0, 0])) == (10, 200)
    assert one.assets() != other.assets()
    again = open_images(paths[0], "folder", side=16, cache=tmp_path / "c")
    assert again.assets() == one.assets()


def test_a_run_is_not_continued_on_other_images_of_the_same_name(tmp_path):
    def arguments(of):
        data = ["--task.layout", "folder", "--task.data-dir", str(tmp_path / of / "photos")]
        data += ["--task.cache-dir", str(tmp_path / "c"), "--task.side", "16", "--task.crop", "8"]
        data += ["--task.patch", "4", "--model.dim", "8", "--model.heads", "1"]
        data += ["--model.layers", "1", "--model.memory-layers", "0", "--model.method", "base"]
        data += ["--budget.steps", "1", "--budget.batch-size", "2", "--quiet", "--device", "cpu"]
        return ["run", "images", *data, "--output", str(tmp_path / "run")]

    for of, shade in (("a", 10), ("b", 200)):
        grey_folder(tmp_path / of / "photos", shade)
    assert main(arguments("a")) == 0
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(ValueError, match=r"images\.txt: expected what this run's data makes"):
        run_command([*arguments("b")[1:], "--resume"])
    assert main([*arguments("a"), "--resume"]) == 0
    (record,) = read_records([tmp_path / "run"])
    checksum = record["facts"]["images_checksum"]
    assert checksum in (tmp_path / "run" / "images.txt").read_text()


def test_more_than_8_bits_are_refused_and_a_picture_lying_on_its_side_is_turned(
    tmp_path, monkeypatch
):
    Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match=r"deep\.png: expected 8 bits per channel, got .* I;16"):
        decode_image(Source(tmp_path), "deep.png", 8)
    turned = Image.Exif()
    turned[274] = 6  # its right side is up
    Image.new("RGB", (16, 8)).save(tmp_path / "phone.jpg", exif=turned)
    assert decode_image(Source(tmp_path), "phone.jpg", 8).shape == (16, 8, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match=r"phone\.jpg: expected an image, .* exceeds limit"):
        decode_image(Source(tmp_path), "phone.jpg", 8)


def test_patches_are_cut_in_raster_order_and_put_back():
    images = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    patches = to_patches(images, 2)
    assert patches.shape == (2, 6, 12)
    assert torch.equal(patches[0, 1].reshape(2, 2, 3), images[0, :, :2, 2:4].permute(1, 2, 0))
    assert torch.equal(from_patches(patches, 2, 4, 6), images)
    with pytest.raises(ValueError, match="expected a divisor of the image's 4 x 6 pixels, got 4"):
        to_patches(images, 4)

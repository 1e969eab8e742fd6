"""UCF-101: official lists, groups that never straddle splits, exact frames, broken clips."""

import sys
import warnings

import numpy as np
import pytest
import torch

from tensor_memory_lab.tasks.clips import (
    Clip,
    VideoError,
    decode_spread,
    load_videos,
    read_lists,
    require_disjoint_groups,
    spread_indices,
)
from tensor_memory_lab.tasks.video import main
from vision_data import CLASSES, number_of, write_ucf, write_video


@pytest.fixture(scope="module")
def ucf(tmp_path_factory):
    return write_ucf(tmp_path_factory.mktemp("ucf"))


@pytest.mark.parametrize("split", [1, 2, 3])
def test_the_lists_give_splits_that_share_no_group(ucf, split):
    lists = read_lists(ucf, split=split)
    assert lists.classes == CLASSES
    groups = {name: {c.group for c in clips} for name, clips in lists.splits.items()}
    assert {group[-3:] for group in groups["test"]} == {f"g0{split}"}
    assert len(groups["train"] | groups["valid"] | groups["test"]) == 12
    assert sum(len(part) for part in groups.values()) == 12
    assert {c.label for c in lists.splits["valid"]} == {0, 1, 2}  # every class has validation
    assert sum(len(clips) for clips in lists.splits.values()) == 24 == len(lists.all())


def test_named_classes_are_labelled_in_the_official_order(ucf):
    lists = read_lists(ucf / "ucfTrainTestlist", classes=("Bowling", "Archery"))
    assert lists.classes == ("Archery", "Bowling")
    labels = {(c.name.partition("/")[0], c.label) for c in lists.all()}
    assert labels == {("Archery", 0), ("Bowling", 1)}


def test_without_the_lists_there_is_no_split(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"classInd\.txt: not there, and clips are never"):
        read_lists(tmp_path)


def test_an_unknown_class_or_split_is_named(ucf):
    with pytest.raises(ValueError, match=r"classes: Juggling not in .*such as Archery"):
        read_lists(ucf, classes=("Juggling",))
    with pytest.raises(ValueError, match="official splits 1, 2 and 3, got 4"):
        read_lists(ucf, split=4)


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("trainlist01", "Archery/v_Archery_g09_c01.avi 3", "classInd.txt calls Archery number 1"),
        ("trainlist01", "Archery/clip.avi 1", "expected `<Class>/v_<Class>_gNN_cNN.avi"),
        ("trainlist01", "Juggling/v_Juggling_g09_c01.avi 4", "got 'Juggling/v_Juggling_g09_c"),
        ("trainlist01", "Archery/v_Archery_g01_c03.avi 1", "Archery/g01 is in .* and in test"),
        ("classInd", "5 Juggling", "expected `<number> <Class>` on every line, numbered from 1"),
    ],
)
def test_a_list_that_contradicts_itself_is_refused(ucf, tmp_path, file, line, complaint):
    for path in (ucf / "ucfTrainTestlist").iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    with (tmp_path / f"{file}.txt").open("a") as opened:
        opened.write(line + "\n")
    with pytest.raises(ValueError, match=complaint):
        read_lists(tmp_path)


@pytest.mark.parametrize("pair", [("train", "valid"), ("valid", "test"), ("train", "test")])
def test_a_group_in_any_two_splits_raises(pair):
    splits = {name: [Clip(f"A/{name}.avi", 0, f"A/{name}")] for name in ("train", "valid", "test")}
    require_disjoint_groups(splits)
    splits[pair[1]].append(Clip("A/again.avi", 0, f"A/{pair[0]}"))
    with pytest.raises(ValueError, match=f"is in {pair[0]} and in {pair[1]} \\(A/again.avi\\)"):
        require_disjoint_groups(splits)


CODECS = [("avi", "mpeg4"), ("mp4", "mpeg4"), ("avi", "libx264"), ("mp4", "libx264")]
decoders = pytest.mark.parametrize("decoder", ["pyav", "opencv"])


@decoders
@pytest.mark.parametrize(("suffix", "codec"), CODECS)
def test_the_frames_asked_for_are_the_frames_that_come(tmp_path, suffix, codec, decoder):
    path = write_video(tmp_path / f"clip.{suffix}", 50, codec=codec)
    for count in (1, 7, 50, 100):  # on and between key frames, all of them, and each twice
        frames = decode_spread(path, count, (32, 64), decoder)
        assert frames.shape == (count, 32, 64, 3)
        assert [number_of(frame) for frame in frames] == spread_indices(50, count)


def test_both_decoders_return_the_same_pictures(tmp_path):
    """Frame by frame the same picture: colour conversion may round apart, another frame may not."""
    path = write_video(tmp_path / "clip.avi", 30, tint=30)
    ours, theirs = (decode_spread(path, 9, (32, 64), name) for name in ("pyav", "opencv"))
    assert np.abs(ours.astype(int) - theirs.astype(int)).mean() < 2  # levels of 255
    other = np.abs(ours[1:].astype(int) - theirs[:-1].astype(int)).mean((1, 2, 3))
    assert other.min() > 20
    ours, theirs = (decode_spread(path, 3, (16, 24), name) for name in ("pyav", "opencv"))
    assert ours.shape == theirs.shape == (3, 16, 24, 3)
    assert np.abs(ours.astype(int) - theirs.astype(int)).mean() < 2


def cut_short(path):
    """Half of the pictures are gone; the header still promises all of them."""
    whole = path.read_bytes()
    path.write_bytes(whole[: (whole.index(b"movi") + whole.index(b"idx1")) // 2])
    return path


@decoders
def test_a_truncated_video_is_recognised(tmp_path, decoder):
    path = cut_short(write_video(tmp_path / "clip.avi", 40))
    with pytest.raises(VideoError, match=r"clip\.avi: truncated, \d+ of the declared 40 fr"):
        decode_spread(path, 4, (32, 64), decoder)


def test_damage_that_the_decoder_would_paint_over_is_an_error(tmp_path):
    """FFmpeg fills a broken part in from its neighbours and goes on; only a mark is left."""
    path = write_video(tmp_path / "clip.avi", 40)
    broken = bytearray(path.read_bytes())
    broken[(broken.index(b"movi") + broken.index(b"idx1")) // 2] ^= 0xFF
    path.write_bytes(broken)
    with pytest.raises(VideoError, match=r"clip\.avi: the decoder marks a frame at \d+ as corrupt"):
        decode_spread(path, 4, (32, 64), "pyav")


@decoders
def test_a_file_that_is_no_video_is_recognised(tmp_path, decoder):
    path = tmp_path / "clip.avi"
    path.write_bytes(b"nothing to see" * 100)
    with pytest.raises(VideoError, match=r"clip\.avi: expected a video, but it cannot be opened"):
        decode_spread(path, 4, (32, 64), decoder)


@pytest.mark.parametrize(("module", "decoder"), [("av", "pyav"), ("cv2", "opencv")])
def test_a_decoder_that_is_not_installed_names_the_other(tmp_path, monkeypatch, module, decoder):
    path = write_video(tmp_path / "clip.avi", 3)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"decoder {decoder}: .* is not installed; .*pip install"):
        decode_spread(path, 1, (32, 64), decoder)


def load(data, cache, **options):
    options = {"frames": 4, "size": (32, 64)} | options
    return load_videos(
        data, options.pop("clips", None) or read_lists(data).all(), cache=cache, **options
    )


def test_every_clips_frames_are_kept_and_found_without_the_videos(ucf, tmp_path):
    store = load(ucf, tmp_path)
    assert store.frames.shape == (24, 4, 32, 64, 3)
    assert store.frames.dtype == torch.uint8
    assert store.left_out == {}
    numbers = [[number_of(f) for f in clip] for clip in store.frames.numpy()]
    assert numbers == [spread_indices(12, 4)] * 24
    assert torch.equal(load("nowhere", tmp_path, clips=read_lists(ucf).all()).frames, store.frames)
    load(ucf, tmp_path, decoder="opencv")
    assert len(list(tmp_path.iterdir())) == 4  # another decoder has a cache of its own


def test_missing_videos_are_named_with_the_layout(ucf, tmp_path):
    clips = read_lists(ucf).all()
    with pytest.raises(FileNotFoundError, match=r"24 of 24 clips are missing\); expected videos"):
        load(ucf / "ucfTrainTestlist", tmp_path, clips=clips)
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder; expected UCF-101 as"):
        load("nowhere", tmp_path, clips=clips)


@pytest.fixture
def damaged(tmp_path):
    folder = write_ucf(tmp_path / "data")
    cut_short(folder / "UCF-101/Bowling/v_Bowling_g03_c02.avi")
    (folder / "UCF-101/Archery/v_Archery_g02_c01.avi").write_bytes(b"")
    return folder


def test_broken_clips_are_named_counted_and_left_out(damaged, tmp_path):
    lost = {"Archery/v_Archery_g02_c01.avi", "Bowling/v_Bowling_g03_c02.avi"}
    for _ in range(2):  # a cache found again says so again
        with pytest.warns(UserWarning, match=r"2 of 24 clips cannot .*Archery_g02_c01.*Bowl"):
            store = load(damaged, tmp_path / "cache")
        assert set(store.left_out) == lost
        assert len(store.row) == 22
        assert not set(store.row) & lost


def test_strict_makes_a_broken_clip_an_error_and_leaves_no_cache(damaged, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(VideoError, match=r"v_Archery_g02_c01\.avi: expected a video"):
        load(damaged, cache, strict=True)
    assert list(cache.iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(damaged, cache)
    with pytest.raises(VideoError, match="2 of 24 clips cannot be decoded, left out"):
        load(damaged, cache, strict=True)


def test_the_command_prepares_a_cache_or_says_what_is_wrong(ucf, tmp_path, capsys):
    main(["--data-dir", str(ucf), "--cache-dir", str(tmp_path), "--cached-frames", "8"])
    assert "24 clips ready, 0 left out" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(SystemExit, match=r"error: nowhere/classInd.txt: not there"):
        main(["--data-dir", "nowhere"])

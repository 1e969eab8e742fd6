"""UCF-101: official lists, groups that never straddle splits, exact frames, a cache to trust."""

import threading
import time
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from tensor_memory_lab.tasks import video_cache
from tensor_memory_lab.tasks.video_cache import load_videos, main
from tensor_memory_lab.tasks.video_decoding import (
    VideoError,
    declared_frames,
    decode_spread,
    spread_indices,
)
from tensor_memory_lab.tasks.video_files import (
    Clip,
    find_videos,
    read_lists,
    require_disjoint_groups,
)
from vision_data import CLASSES, number_of, write_ucf, write_video


@pytest.fixture(scope="module")
def ucf(tmp_path_factory):
    return write_ucf(tmp_path_factory.mktemp("ucf"))


@pytest.mark.parametrize("split", [1, 2, 3])
def test_the_lists_give_splits_that_share_no_group(ucf, split):
    lists = read_lists(ucf / "ucfTrainTestlist", split=split)
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
    assert {(c.name.partition("/")[0], c.label) for c in lists.all()} == {
        ("Archery", 0),
        ("Bowling", 1),
    }


def test_without_the_lists_there_is_no_split(ucf):
    with pytest.raises(FileNotFoundError, match=r"classInd\.txt: not there, and clips are never"):
        read_lists(ucf)


def test_an_unknown_class_or_split_is_named(ucf):
    with pytest.raises(ValueError, match=r"classes: Juggling not in .*such as Archery"):
        read_lists(ucf / "ucfTrainTestlist", classes=("Juggling",))
    with pytest.raises(ValueError, match="official splits 1, 2 and 3, got 4"):
        read_lists(ucf / "ucfTrainTestlist", split=4)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("Archery/v_Archery_g09_c01.avi 3", "class number 3, but classInd.txt calls Archery num"),
        ("Archery/clip.avi 1", "expected `<Class>/v_<Class>_gNN_cNN.avi"),
        ("Juggling/v_Juggling_g09_c01.avi 4", "got 'Juggling/v_Juggling_g09_c01.avi 4'"),
        ("Archery/v_Archery_g01_c03.avi 1", r"group Archery/g01 is in (train|valid) and in test"),
    ],
)
def test_a_wrong_line_is_named(ucf, tmp_path, line, complaint):
    for path in (ucf / "ucfTrainTestlist").iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    with (tmp_path / "trainlist01.txt").open("a") as file:
        file.write(line + "\n")
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


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
@pytest.mark.parametrize(("suffix", "codec"), CODECS)
def test_the_frames_asked_for_are_the_frames_that_come(tmp_path, suffix, codec, decoder):
    path = write_video(tmp_path / f"clip.{suffix}", 50, codec=codec)
    assert declared_frames(path, decoder) == 50
    frames = decode_spread(path, 7, (32, 64), decoder)  # on and between key frames
    assert frames.shape == (7, 32, 64, 3)
    assert [number_of(frame) for frame in frames] == [3, 10, 17, 25, 32, 39, 46]
    every = decode_spread(path, 50, (32, 64), decoder)
    assert [number_of(frame) for frame in every] == list(range(50))
    twice = decode_spread(path, 100, (32, 64), decoder)
    assert [number_of(frame) for frame in twice] == [i // 2 for i in range(100)]


@pytest.mark.parametrize(("suffix", "codec"), CODECS)
def test_both_decoders_return_the_same_pictures(tmp_path, suffix, codec):
    """Frame by frame the same picture: colour conversion may round apart, another frame may not."""
    path = write_video(tmp_path / f"clip.{suffix}", 30, codec=codec, tint=30)
    ours, theirs = (decode_spread(path, 9, (32, 64), name) for name in ("pyav", "opencv"))
    apart = np.abs(ours.astype(int) - theirs.astype(int))
    assert apart.mean() < 2  # levels of 255; neighbouring frames are 30 or more apart
    other = np.abs(ours[1:].astype(int) - theirs[:-1].astype(int)).mean((1, 2, 3))
    assert other.min() > 20


@pytest.mark.parametrize("count", [1, 8, 25, 40])
def test_frames_are_spread_over_the_whole_clip(tmp_path, count):
    path = write_video(tmp_path / "clip.avi", 25)
    frames = decode_spread(path, count, (32, 64), "pyav")
    assert [number_of(frame) for frame in frames] == spread_indices(25, count)


def test_frames_are_resized_alike_whatever_the_decoder(tmp_path):
    path = write_video(tmp_path / "clip.avi", 6)
    ours, theirs = (decode_spread(path, 3, (16, 24), name) for name in ("pyav", "opencv"))
    assert ours.shape == theirs.shape == (3, 16, 24, 3)
    assert np.abs(ours.astype(int) - theirs.astype(int)).mean() < 2


def cut_short(path):
    """Half of the pictures are gone; the header still promises all of them."""
    whole = path.read_bytes()
    path.write_bytes(whole[: (whole.index(b"movi") + whole.index(b"idx1")) // 2])
    return path


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
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


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
def test_a_file_that_is_no_video_is_recognised(tmp_path, decoder):
    path = tmp_path / "clip.avi"
    path.write_bytes(b"nothing to see" * 100)
    with pytest.raises(VideoError, match=r"clip\.avi: expected a video, but it cannot be opened"):
        decode_spread(path, 4, (32, 64), decoder)


def test_a_sound_without_pictures_is_no_video(tmp_path):
    import wave

    with wave.open(str(tmp_path / "clip.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(1000))
    with pytest.raises(VideoError, match="it holds no picture"):
        decode_spread(tmp_path / "clip.wav", 4, (32, 64), "pyav")


def test_an_unknown_decoder_is_named(tmp_path):
    path = write_video(tmp_path / "clip.avi", 3)
    with pytest.raises(ValueError, match="expected pyav or opencv, got 'ffmpeg'"):
        decode_spread(path, 1, (32, 64), "ffmpeg")  # type: ignore[arg-type]


@pytest.mark.parametrize(("module", "decoder"), [("av", "pyav"), ("cv2", "opencv")])
def test_a_decoder_that_is_not_installed_names_the_other(tmp_path, monkeypatch, module, decoder):
    path = write_video(tmp_path / "clip.avi", 3)
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ImportError, match=f"decoder {decoder}: .* is not installed; .*pip install"):
        decode_spread(path, 1, (32, 64), decoder)


def load(ucf, cache, **options):
    lists = read_lists(ucf / "ucfTrainTestlist")
    options = {"frames": 4, "size": (32, 64)} | options
    return load_videos(ucf, lists.all(), cache=cache, **options)


def test_the_cache_holds_every_clips_frames(ucf, tmp_path):
    store = load(ucf, tmp_path)
    assert store.frames.shape == (24, 4, 32, 64, 3)
    assert store.frames.dtype == torch.uint8
    assert store.left_out == {}
    numbers = [[number_of(f) for f in clip] for clip in store.frames.numpy()]
    assert numbers == [spread_indices(12, 4)] * 24


def test_the_second_load_reads_the_cache_and_needs_no_video(ucf, tmp_path, monkeypatch):
    first = load(ucf, tmp_path)
    monkeypatch.delattr("tensor_memory_lab.tasks.video_cache.decode_spread")
    second = load(ucf, tmp_path)
    assert torch.equal(first.frames, second.frames)
    lists = read_lists(ucf / "ucfTrainTestlist")
    third = load_videos("nowhere", lists.all(), frames=4, size=(32, 64), cache=tmp_path)
    assert torch.equal(first.frames, third.frames)


def test_another_decoder_or_size_gets_a_cache_of_its_own(ucf, tmp_path):
    load(ucf, tmp_path)
    load(ucf, tmp_path, decoder="opencv")
    load(ucf, tmp_path, size=(16, 32))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_missing_clip_is_named_with_the_layout(ucf, tmp_path):
    videos = find_videos(ucf)
    assert videos == ucf / "UCF-101" == find_videos(ucf / "UCF-101")
    with pytest.raises(
        FileNotFoundError, match=r"24 of 24 clips are missing\); expected videos as"
    ):
        load_videos(
            ucf / "ucfTrainTestlist",
            read_lists(ucf / "ucfTrainTestlist").all(),
            frames=4,
            size=(8, 8),
            cache=tmp_path,
        )
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder; expected UCF-101 as"):
        find_videos("nowhere")


@pytest.fixture
def damaged(tmp_path):
    folder = write_ucf(tmp_path / "data")
    broken = folder / "UCF-101/Bowling/v_Bowling_g03_c02.avi"
    cut_short(broken)
    (folder / "UCF-101/Archery/v_Archery_g02_c01.avi").write_bytes(b"")
    return folder


def test_broken_clips_are_named_counted_and_left_out(damaged, tmp_path):
    with pytest.warns(UserWarning, match=r"2 of 24 clips cannot be decoded.*Archery_g02_c01.*Bowl"):
        store = load(damaged, tmp_path / "cache")
    assert set(store.left_out) == {
        "Archery/v_Archery_g02_c01.avi",
        "Bowling/v_Bowling_g03_c02.avi",
    }
    assert len(store.row) == 22
    assert not set(store.row) & set(store.left_out)
    with pytest.warns(UserWarning, match="2 of 24"):  # a cache found again says so again
        load(damaged, tmp_path / "cache")


def test_strict_makes_a_broken_clip_an_error_and_leaves_no_cache(damaged, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(VideoError, match=r"v_Archery_g02_c01\.avi: expected a video"):
        load(damaged, cache, strict=True)
    assert list(cache.iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(damaged, cache)
    with pytest.raises(VideoError, match="2 clips were left out"):
        load(damaged, cache, strict=True)


def test_a_cache_of_videos_that_changed_is_refused(damaged, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(damaged, tmp_path / "cache")
        write_video(damaged / "UCF-101/Archery/v_Archery_g02_c01.avi", 12)
        with pytest.raises(ValueError, match=r"g02_c01\.avi of 0 bytes, which now has"):
            load(damaged, tmp_path / "cache")


def test_an_interrupted_decoding_drops_what_is_not_begun(ucf, tmp_path, monkeypatch):
    begun, interrupted = [], threading.Event()

    def decode(path, *_):
        begun.append(path)
        if len(begun) > 1:
            interrupted.wait(30)
            time.sleep(0.05)  # longer than the main thread takes to drop the others
        return 0

    def advance(**_):
        interrupted.set()
        raise KeyboardInterrupt

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(video_cache, "decode_spread", decode)
    monkeypatch.setattr(video_cache, "progress", lambda *_, **__: nullcontext(advance))
    with pytest.raises(KeyboardInterrupt):
        load(ucf, tmp_path)
    assert len(begun) < 24
    assert list(tmp_path.iterdir()) == []


def test_the_command_prepares_a_cache_that_training_finds(ucf, tmp_path, capsys):
    arguments = [
        "--data",
        str(ucf),
        "--lists",
        str(ucf),
        "--cache",
        str(tmp_path),
    ]
    assert main([*arguments, "--frames", "4", "--size", "32", "64"]) == 0
    assert "24 clips ready, 0 left out" in capsys.readouterr().out
    load(ucf, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"--lists": "nowhere"}, "nowhere/classInd.txt: not there"),
        ({"--data": "nowhere"}, "nowhere: no such folder"),
        ({"--classes": "Flying"}, "classes: Flying not in"),
        ({"--frames": "0"}, "--frames: expected 1 or more, got 0"),
    ],
)
def test_the_command_tells_what_is_wrong(ucf, tmp_path, capsys, changed, said):
    options = {"--data": str(ucf), "--lists": str(ucf), "--cache": str(tmp_path)} | changed
    with pytest.raises(SystemExit) as stopped:
        main([word for pair in options.items() for word in pair])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err

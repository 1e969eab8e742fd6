"""Decoded arrays on disk: found again, never half written, never trusted when damaged."""

import io
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tensor_memory_lab.tasks.cache import cached_array, decode_all

KEY = {"side": (2, 3), "files": ["a", "b"]}
SIZES = {"a": 10, "b": 20}


def make(path):
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(2, 3))[:] = 7
    return {"left_out": {}}


def refuse(path):
    raise AssertionError("expected to find the cache")


def load(folder, *, key=KEY, sizes=SIZES, make=make):
    return cached_array(folder, "kind", key, sizes, make)


def files(folder):
    return sorted(path.suffix for path in folder.iterdir())


def test_an_array_is_made_once_and_then_found_also_without_its_sources(tmp_path):
    first, facts = load(tmp_path / "new")
    again, same = load(tmp_path / "new", sizes={}, make=refuse)
    assert first.tolist() == again.tolist() == [[7] * 3] * 2
    assert facts == same == {"left_out": {}, "checksum": facts["checksum"]}
    assert files(tmp_path / "new") == [".json", ".npy"]


def test_another_request_has_files_of_its_own(tmp_path):
    load(tmp_path)
    load(tmp_path, key=KEY | {"side": (3, 3)})
    load(tmp_path, key=KEY | {"files": ["b", "a"]})
    assert len(files(tmp_path)) == 6


@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_a_cache_without_one_of_its_files_is_made_again(tmp_path, suffix):
    load(tmp_path)
    next(tmp_path.glob(f"*{suffix}")).unlink()
    with pytest.raises(AssertionError, match="expected to find"):
        load(tmp_path, make=refuse)
    assert load(tmp_path)[0].tolist() == [[7] * 3] * 2


def change_a_byte(array, described):
    content = bytearray(array.read_bytes())
    content[-1] ^= 1
    array.write_bytes(content)


def cut_short(array, described):
    array.write_bytes(array.read_bytes()[:-1])


def garble(array, described):
    described.write_text("{")


def change_key(array, described):
    described.write_text(json.dumps(json.loads(described.read_text()) | {"key": {}}))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (change_a_byte, r"\.npy: expected the checksum \w{8}, got \w{8}"),
        (cut_short, r"\.npy: expected the checksum"),
        (garble, r"\.json: expected the description of a cache as JSON"),
        (change_key, r"\.json: expected the key that was asked for, got another"),
    ],
)
def test_a_damaged_or_foreign_cache_is_refused_and_names_the_remedy(tmp_path, damage, complaint):
    load(tmp_path)
    damage(next(tmp_path.glob("*.npy")), next(tmp_path.glob("*.json")))
    with pytest.raises(ValueError, match=f"{complaint}.*; delete .* to decode again"):
        load(tmp_path, make=refuse)


def test_a_cache_of_files_that_have_changed_is_refused(tmp_path):
    load(tmp_path)
    with pytest.raises(ValueError, match=r"made from a b of 20 bytes, which now has 21; delete"):
        load(tmp_path, sizes={"b": 21})


def test_a_failed_decoding_leaves_nothing(tmp_path):
    def broken(path):
        make(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, make=broken)
    assert files(tmp_path) == []


class Heard(io.StringIO):
    """A place to print to that knows at once whether some words were printed."""

    def __init__(self, words):
        super().__init__()
        self.words, self.event = words, threading.Event()

    def write(self, text):
        if self.words in text:
            self.event.set()
        return super().write(text)


def test_of_two_who_want_a_cache_one_makes_it_and_the_other_waits(tmp_path, monkeypatch):
    begun, go_on, heard = threading.Event(), threading.Event(), Heard("waiting for it")

    def slowly(path):
        begun.set()
        assert go_on.wait(120)
        return make(path)

    monkeypatch.setattr(sys, "stderr", heard)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load, tmp_path, make=slowly)
        assert begun.wait(120)
        second = pool.submit(load, tmp_path, make=refuse)
        waited = heard.event.wait(60)
        go_on.set()
        assert first.result()[0].tolist() == second.result()[0].tolist()
    assert waited
    assert files(tmp_path) == [".json", ".npy"]


def test_errors_of_a_skipped_kind_are_told_by_name_and_others_raised(capsys):
    def decode(name):
        return {"a": 1, "b": 2}[name]

    found, errors = decode_all(decode, ["a", "x", "b"], unit="files", skipped=KeyError)
    assert (found, errors) == ([1, 2], {"x": "'x'"})
    assert "3 of 3 files, 100 %" in capsys.readouterr().err
    with pytest.raises(KeyError, match="x"):
        decode_all(decode, ["a", "x", "b"], unit="files")


def test_an_error_drops_what_has_not_begun(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    begun, ended = [], threading.Event()

    def decode(name):
        begun.append(name)
        if len(begun) == 1:
            raise ValueError("broken")
        ended.wait(1)  # longer than the main thread takes to drop the others

    with pytest.raises(ValueError, match="broken"):
        decode_all(decode, [str(number) for number in range(50)], unit="files")
    ended.set()
    assert len(begun) < 50

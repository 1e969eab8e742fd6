"""A page that follows a running process, in a real browser, and who is let in."""

import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch
from browsing import PATIENCE, text
from invented import invented

from tensor_memory import MemoryConfig, MemoryResidual, Recording, TensorMemory, record
from tensor_memory.cli import main
from tensor_memory.inspect.progress import LongWork
from tensor_memory.inspect.watch import WatchServer

sync_api = pytest.importorskip("playwright.sync_api", reason="the viewer needs playwright")


ASKS_SOONER = "const wait = setTimeout; setTimeout = (then, ms) => wait(then, ms / 20)"


@pytest.fixture
def watching(tmp_path):
    """The command, which watches before there is anything."""
    command = [sys.executable, "-m", "tensor_memory", "watch", tmp_path / "run.safetensors"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_a_page_follows_a_model_that_generates(watching, browser, tmp_path, monkeypatch):
    monkeypatch.setattr("tensor_memory.inspect.recorder._Live.EVERY", 0.05)
    address = watching.stdout.readline().split()[1]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
    page = browser.new_page()
    complaints, outside = [], []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: outside.append(asked.url))
    page.set_default_timeout(PATIENCE)
    page.add_init_script(ASKS_SOONER)
    page.goto(address)
    assert text(page, "#empty-name") == "Waiting for the first step"
    assert 'live="run.safetensors"' in text(page, "#empty-code")
    position = sync_api.expect(page.locator("#position"))
    model = MemoryResidual(TensorMemory(8, MemoryConfig(channels=4, grid=(3, 3), chunk_size=1)))
    texts, state, run = [[]], None, tmp_path / "run.safetensors"

    def generate(until):
        nonlocal state
        while len(texts[0]) < until:
            texts[0].append(f" word{len(texts[0])}")
            _, state = model(torch.randn(1, 1, 8), state)

    with torch.no_grad(), record(model, live=run, texts=texts):
        generate(6)
        position.to_have_text("5 / 5", timeout=PATIENCE)
        assert "word5" in text(page, "#text .here")
        generate(20)
        position.to_have_text("19 / 19", timeout=PATIENCE)  # it has followed
        page.keyboard.press("Home")
        assert not page.locator("#follow").is_checked()
        page.select_option("#measure", "forget")
        generate(30)
        position.to_have_text("0 / 29", timeout=PATIENCE)  # where somebody looks is not left
        assert page.locator("#measure").input_value() == "forget"
        page.check("#follow")
        position.to_have_text("29 / 29", timeout=PATIENCE)
    assert Recording.load(run).texts == [[f" word{t}" for t in range(30)]]
    watching.send_signal(signal.SIGINT)
    assert watching.wait(PATIENCE / 1000) == 130
    ended = sync_api.expect(page.locator("#copied"))
    ended.to_have_text("nothing answers: the command has ended", timeout=PATIENCE)
    assert complaints == []
    assert all(url.startswith((address, "data:")) for url in outside)
    page.close()


@pytest.fixture
def served(tmp_path):
    invented(1, chunks=40).save(tmp_path / "run.safetensors")
    with WatchServer(tmp_path / "run.safetensors") as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def status_of(address, **headers):
    request = urllib.request.Request(address, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Refused)
    with opener.open(request) as answer:
        return answer.status, answer.read().decode(), answer.headers


class Refused(urllib.request.HTTPErrorProcessor):
    def http_response(self, request, response):
        return response


def test_only_who_knows_the_token_is_let_in_and_only_from_this_machine(served):
    address, port = served.address, served.server_port
    assert served.server_address[0] == "127.0.0.1"
    status, page, headers = status_of(address)
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert "connect-src 'self'" in page
    assert status_of(f"{address}version")[0] == 200
    assert '"layers"' in status_of(f"{address}recording")[1]
    assert status_of(f"{address}other")[0] == status_of(address[:-1])[0] == 404
    wrong = f"http://127.0.0.1:{port}/{'x' * len(served.token)}/"
    refused = [f"http://127.0.0.1:{port}/", wrong, f"{wrong}recording", f"{wrong}../{served.token}"]
    for at in refused:
        status, told, _ = status_of(at)
        assert status == 403
        assert "run.safetensors" not in told
        assert "layers" not in told
    assert status_of(address, Host="evil.example")[0] == 403
    assert status_of(address, Host=f"localhost:{port}")[0] == 200


def test_the_server_ends_after_an_answer_that_has_begun(served, monkeypatch):
    begun, ended = threading.Event(), []

    def values():
        begun.set()
        time.sleep(0.3)  # a daemon's thread would be torn down in here with the interpreter
        ended.append(True)
        return "{}"

    monkeypatch.setattr(served.watched, "values", values)
    asked = threading.Thread(target=status_of, args=[f"{served.address}recording"])
    asked.start()
    begun.wait()
    served.shutdown()
    served.server_close()
    assert ended
    asked.join()


def test_a_browser_that_leaves_in_the_middle_of_an_answer_is_nothing_to_tell(
    served, monkeypatch, capsys
):
    asked, left = threading.Event(), threading.Event()

    def values():
        asked.set()
        left.wait()
        return " " * 10**7

    monkeypatch.setattr(served.watched, "values", values)
    with socket.create_connection(served.server_address) as browser:
        request = f"GET /{served.token}/recording HTTP/1.0\r\nHost: 127.0.0.1:{served.server_port}"
        browser.sendall(f"{request}\r\n\r\n".encode())
        asked.wait()
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # at once
    left.set()
    served.shutdown()
    served.server_close()
    assert capsys.readouterr().err == ""


def test_a_recording_that_is_too_large_is_thinned_and_says_so(served, monkeypatch):
    from tensor_memory.inspect import page as pages

    monkeypatch.setattr(pages, "LIMIT_MB", 0.03)
    values = served.watched.values()
    assert "One recorded chunk in 2 is on this page" in values


def test_a_foreign_file_a_folder_a_missing_folder_and_no_port_are_refused(tmp_path, capsys):
    (tmp_path / "foreign").write_text("no recording")
    for path in (tmp_path / "foreign", tmp_path, tmp_path / "none" / "run.safetensors"):
        assert main(["watch", str(path)]) == 2
        assert "expected" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["watch", str(tmp_path / "run"), "--port", "65536"])
    assert "expected a port from 0 to 65535, got '65536'" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", str(tmp_path / "run"), "--port", str(port)]) == 2
    told = capsys.readouterr().err
    assert f"--port: expected a port that this process may listen on, got {port} (Addr" in told
    assert "; leave --port out for any that is free" in told
    memory = TensorMemory(8, MemoryConfig(channels=2, grid=(2, 2), chunk_size=1))
    with pytest.raises(FileNotFoundError, match="folder that is there"):
        record(memory, live=tmp_path / "none" / "run.safetensors").__enter__()
    with pytest.raises(TypeError, match="expected the path of a file"):
        record(memory, live=7).__enter__()  # pyright: ignore[reportArgumentType]


def test_a_long_recording_and_a_long_page_say_how_far_they_have_come(monkeypatch, capsys, tmp_path):
    memory = TensorMemory(8, MemoryConfig(channels=2, grid=(2, 2), chunk_size=1))
    clock = iter(range(0, 10_000, 7))
    monkeypatch.setattr(LongWork, "_clock", lambda _: next(clock))
    with torch.no_grad(), record(memory) as recording:
        memory(torch.randn(1, 12, 8))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "recording: 5 steps of 1 layer in 0:00:35",
        "recording: 10 steps of 1 layer in 0:01:10",
    ]
    monkeypatch.setattr(LongWork, "_clock", lambda _: 40 * next(clock))
    recording.save_page(tmp_path / "page.html")
    assert capsys.readouterr().err.startswith("page: 1 layers and rows followed")
    with torch.no_grad(), record(memory, progress=False):
        memory(torch.randn(1, 12, 8))
    assert capsys.readouterr().err == ""

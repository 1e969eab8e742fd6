"""A browser for the viewer: Debian's chromium, headless, opening pages from disk."""

import functools
import shutil

import pytest
from browsing import PATIENCE, WINDOW, settle
from invented import invented

from tensor_memory import Recording

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="the viewer needs playwright")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if found is None:
        pytest.skip("no chromium here: the viewer is not tested (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=found, args=[*QUIET], timeout=PATIENCE
        )
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def windows(browser):
    """An empty page by its size, scheme and touch, with what it complains of and asks for.

    A new one takes longer than most tests; a page that is opened in it starts anew.
    """

    @functools.cache
    def window(size, scheme, touch):
        width, height = size
        page = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            has_touch=touch,
            is_mobile=touch,
        ).new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        return page

    complaints, requests = [], []
    return window, complaints, requests


@pytest.fixture
def opened(windows, tmp_path):
    """Opens the page of a recording; in the end no page has complained or asked for anything."""
    window, complaints, requests = windows
    count = 0
    complaints.clear()
    requests.clear()

    def open_page(
        recording: Recording, *, size=WINDOW, scheme="light", touch=False, at="#t=0", **options
    ):
        nonlocal count
        count += 1
        path = tmp_path / f"{count}.html"
        recording.save_page(path, **options)
        page = window(size, scheme, touch)
        page.emulate_media(color_scheme=scheme)
        page.goto(path.as_uri() + at)
        settle(page)
        return page

    yield open_page
    outside = [url for url in requests if not url.startswith(("file:", "data:"))]
    assert (complaints, outside) == ([], [])
    assert len([url for url in requests if url.startswith("file:")]) == count


@pytest.fixture(scope="module")
def recording() -> Recording:
    return invented(3, chunks=24, rows=2)

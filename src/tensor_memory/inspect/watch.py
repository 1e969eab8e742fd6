"""tensor-memory watch RECORDING: a local page that follows a recording while it is made.

The process that records writes its file anew every second or so (`record(live=...)`). This one
serves the page and asks nothing of the other. It listens on the loopback alone; the address has a
random token, and a request with another token, or for another host, is refused.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tensor_memory.inspect.page import filled_page, fitting_values
from tensor_memory.inspect.recording import Recording

WORK = 2**28
"""Multiplications, about, that following the writes may take each time: half a second."""


class WatchedFile:
    """The recording in a file as a page reads it, made again where the file has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made = ("", "")
        self._one_at_a_time = threading.Lock()

    def version(self) -> str:
        """Changes with the file; empty where there is none yet."""
        if not self.path.exists():
            return ""
        found = self.path.stat()
        return f"{found.st_mtime_ns}-{found.st_size}"

    def values(self) -> str:
        """The recording as JSON."""
        with self._one_at_a_time:
            version = self.version()
            if not self._made[1] or self._made[0] != version:
                recording = Recording.load(self.path) if version else Recording()
                self._made = (version, fitting_values(recording, live=version, work=WORK))
            return self._made[1]


class WatchServer(ThreadingHTTPServer):
    """Serves one recording on the loopback, to those who know the token."""

    daemon_threads = False  # an answer in torch may not be cut off by the interpreter's end

    def __init__(self, path: Path, port: int = 0) -> None:
        self.watched, self.token = WatchedFile(path), secrets.token_urlsafe(24)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of errors, but not of a browser that has left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 5  # seconds that a browser may be silent; the end of the server waits for it

    def do_GET(self) -> None:
        """The page, its version or its values."""
        server = self.server
        assert isinstance(server, WatchServer)
        hosts = (f"127.0.0.1:{server.server_port}", f"localhost:{server.server_port}")
        _, token, what = f"{self.path}//".split("/", 2)
        known = secrets.compare_digest(token.encode(), server.token.encode())
        if not known or self.headers.get("Host") not in hosts:
            return self._answer(403, "text/plain", "forbidden: use the address that was printed")
        watched, what = server.watched, what.rstrip("/")
        if what == "version":
            return self._answer(200, "text/plain", watched.version())
        if what == "recording":
            return self._answer(200, "application/json", watched.values())
        if what == "" and self.path.endswith("/"):
            page = filled_page(watched.path.name, watched.values(), live=True)
            return self._answer(200, "text/html", page)
        return self._answer(404, "text/plain", "nothing is here: the address ends with /")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the token is in every line."""


def run_watch(options: argparse.Namespace) -> int:
    """Serve until interrupted."""
    path: Path = options.recording
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(
            f"{path}: expected the file that record(live=...) writes, got a folder or a file in a "
            "folder that is not there; name the file, which may not exist yet"
        )
    if path.exists():
        Recording.load(path)  # a foreign file is told here
    with _server(path, options.port) as server:
        print(f"watch: {server.address} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


def _server(path: Path, port: int) -> WatchServer:
    try:
        return WatchServer(path, port)
    except OSError as error:
        raise OSError(
            f"--port: expected a port that this process may listen on, got {port} "
            f"({error.strerror}); leave --port out for any that is free"
        ) from error

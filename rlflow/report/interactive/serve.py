"""The page of a run over HTTP, on this machine alone: read-only, behind a token, new on asking.

There are two addresses, the page and what is new in it. No address names a file, so none can lead
out of the run. A request has to know the token, and to be meant for this machine.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

from rlflow.errors import Finding, RlflowError, UsageError
from rlflow.report.interactive.payload import packed, page_data
from rlflow.report.report import page_head, page_parts, report_page
from rlflow.report.runfiles import read_run_files
from rlflow.runtime.record.devices.log import DEVICE_LOG
from rlflow.runtime.record.edges.names import RECORDS

LOOPBACK = "127.0.0.1"
FILES = ("run.json", "config.json", "graph.json", "plan.json", "metrics.jsonl", DEVICE_LOG)


class WatchedRun:
    """A run whose files are read again when they have changed, and those laid over its curves.

    Raises RunDirError where one is no run, or is damaged.
    """

    def __init__(self, run_dir: Path, others: Sequence[Path] = ()) -> None:
        self.runs = (run_dir, *others)
        self._lock = threading.Lock()
        self._seen = ""
        self._answer = b""

    def page(self, live: str) -> bytes:
        """The whole page; it asks `live` for what is new."""
        with self._lock:
            files, *others = map(read_run_files, self.runs)
            return report_page(files, others, live=live).encode()

    def answer(self, seen: str) -> bytes | None:
        """What is new as JSON, None where nothing is since `seen`."""
        with self._lock:
            state = self._state()
            if state == seen:
                return None
            if state != self._seen:
                files, *others = map(read_run_files, self.runs)
                parts = {part.name: part.html for part in page_parts(files)}
                found = {
                    "seen": state,
                    "parts": {"head": page_head(files), **parts},
                    "data": packed(page_data(files, others)),
                }
                self._answer, self._seen = json.dumps(found).encode(), state
            return self._answer

    def _state(self) -> str:
        """Times and sizes of the files that the page is made of."""
        paths = [run / name for run in self.runs for name in FILES]
        paths += [path for run in self.runs for path in sorted((run / "spans").glob("*.jsonl"))]
        paths += [path for run in self.runs for path in sorted((run / RECORDS).glob("*"))]
        known = [path.stat() for path in paths if path.exists()]
        return f"{hash(tuple((each.st_mtime_ns, each.st_size) for each in known)):x}"


class PageServer(ThreadingHTTPServer):
    """Serves one run on the loopback address."""

    daemon_threads = True

    def __init__(self, watched: WatchedRun, port: int) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.watched = watched
        self.token = secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"


def serving_page(watched: WatchedRun, port: int = 0) -> PageServer:
    """A server for a run, on a free port unless one is named.

    Raises UsageError E667 where nothing can be served there.
    """
    try:
        return PageServer(watched, port)
    except OSError as error:
        raise UsageError(
            Finding(
                code="E667",
                what=f"cannot serve on port {port} of {LOOPBACK}",
                got=str(error),
                fix="leave --port out: a free one is taken",
            )
        ) from error


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the page and of what is new in it; 403 without the token."""

    server: PageServer
    server_version = "rlflow"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    kinds: ClassVar = {"/": "text/html; charset=utf-8", "/new": "application/json"}

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        if not self._is_let_in(query.get("token", [""])[0]):
            self._send(HTTPStatus.FORBIDDEN, b"wrong token: open the address that rlflow printed\n")
        elif asked.path not in self.kinds:
            self._send(HTTPStatus.NOT_FOUND, b"there is one page here: /\n")
        else:
            self._send_page(asked.path, query.get("seen", [""])[0])

    do_HEAD = do_GET

    def _send_page(self, path: str, seen: str) -> None:
        watched = self.server.watched
        try:
            token = self.server.token
            found = watched.page(f"/new?token={token}") if path == "/" else watched.answer(seen)
        except RlflowError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{error.render()}\n".encode())
            return
        if found is None:
            self._send(HTTPStatus.NO_CONTENT, b"")
        else:
            self._send(HTTPStatus.OK, found, self.kinds[path])

    def _is_let_in(self, token: str) -> bool:
        """Whether the token is right, and no other site's name leads here."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        right = hmac.compare_digest(token.encode(), self.server.token.encode())
        return right and host in (LOOPBACK, "localhost")

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: the terminal is the user's."""

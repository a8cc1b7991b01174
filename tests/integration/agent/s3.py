"""A bucket that answers as told: just enough S3 to read from, with faults on demand."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

BUCKET = "checkpoints"


class S3Server:
    """Serves ``objects``; each of ``faults`` (busy, cut, reset) spoils one later read."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.forbidden = False
        self.hang = False
        self.hanging = 0
        self._released = threading.Event()
        handler = type("Handler", (_Handler,), {"bucket": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wait(self) -> None:
        """Hang until the test is over."""
        self.hanging += 1
        self._released.wait()

    def stop(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """One connection; ``bucket`` is its server."""

    bucket: S3Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        bucket = self.bucket
        if bucket.hang:
            bucket.wait()
            self.close_connection = True
            return
        if bucket.forbidden:
            self._error(403, "AccessDenied")
            return
        key = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").lstrip("/")
        if not key:
            self._send(200, b"<ListBucketResult></ListBucketResult>")
        elif key not in bucket.objects:
            self._error(404, "NoSuchKey")
        else:
            self._object(bucket.objects[key])

    def _object(self, data: bytes) -> None:
        status, headers = 200, {}
        if "Range" in self.headers:
            begin, end = self.headers["Range"].removeprefix("bytes=").split("-")
            last = min(int(end), len(data) - 1)
            headers = {"Content-Range": f"bytes {begin}-{last}/{len(data)}"}
            status, data = 206, data[int(begin) : last + 1]
        fault = self.bucket.faults.pop() if self.bucket.faults and len(data) > 4096 else ""
        if fault == "busy":
            self._error(503, "SlowDown")
        elif fault:
            self._send(status, data, headers, count=len(data) // 2 if fault == "cut" else 0)
            self.close_connection = True
        else:
            self._send(status, data, headers)

    def _error(self, status: int, code: str) -> None:
        self._send(status, f"<Error><Code>{code}</Code></Error>".encode())

    def _send(self, status, data, headers=None, *, count=None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"e"')
        self.end_headers()
        self.wfile.write(data[:count])

    def log_message(self, text: str, *args: object) -> None:
        """Say nothing."""

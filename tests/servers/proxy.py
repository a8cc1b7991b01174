"""An HTTP proxy in front of a server that fails as networks and stores do, when told to.

::

    proxy = FaultProxy(server.endpoint)
    proxy.fail(Drop(after=True), method="PUT", path="manifest.json", times=1)
    open_store(server.at(bucket, endpoint=proxy.endpoint))

A request is forwarded as it came, its ``Host`` too, so that signatures hold.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

FORWARD_S_MAX = 60.0
END_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer ``status`` with S3's error ``code``; ``after``: only when it has been done."""

    status: int
    code: str = ""
    after: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Break the connection; ``after``: only when it has been done."""

    after: bool = False


@dataclass(frozen=True, slots=True)
class Hang:
    """Never answer, until the proxy is closed; ``after``: when it has been done."""

    after: bool = False


@dataclass(frozen=True, slots=True)
class Truncate:
    """Announce the whole answer and break off after ``body_bytes`` of its body."""

    body_bytes: int


@dataclass(frozen=True, slots=True)
class Delay:
    """Answer ``delay_s`` later."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Edit:
    """Change the body of a request on its way to the server, as a broken network card does."""

    change: Callable[[bytes], bytes]


Fault = Answer | Drop | Hang | Truncate | Delay | Edit


@dataclass(slots=True)
class _Rule:
    fault: Fault
    method: str
    path: str
    skip: int
    times_left: int

    def fits(self, method: str, path: str) -> bool:
        return self.method in ("", method) and self.path in path


class FaultProxy:
    """Listens on 127.0.0.1 from the beginning; a thread for each connection.

    With ``checks_parts`` it refuses bytes that are not those of their checksum, as Amazon does.
    """

    def __init__(
        self, upstream: str, *, tls: ssl.SSLContext | None = None, checks_parts: bool = False
    ) -> None:
        self.checks_parts = checks_parts
        self._upstream = urlsplit(upstream)
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.hanging = threading.Event()  # a request has come to where it hangs
        self.requests: list[tuple[str, str]] = []
        self._server = _Server(self)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._scheme = "https" if tls else "http"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The URL that goes through the proxy."""
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    def fail(
        self, fault: Fault, *, method: str = "", path: str = "", skip: int = 0, times: int = 1
    ) -> None:
        """Let ``times`` requests fail, after ``skip`` more that fit: by method and part of URL."""
        with self._lock:
            self._rules.append(_Rule(fault, method, path, skip, times))

    def heal(self) -> None:
        """Let nothing fail any more."""
        with self._lock:
            self._rules.clear()

    def count(self, method: str = "", path: str = "") -> int:
        """Return how many requests came that fit."""
        with self._lock:
            return sum(method in ("", m) and path in p for m, p in self.requests)

    def close(self) -> None:
        """Stop listening and end what hangs."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(END_S_MAX)

    def take(self, method: str, path: str) -> Fault | None:
        """Note a request and return what shall befall it."""
        with self._lock:
            self.requests.append((method, unquote(path)))
            for rule in self._rules:
                if not rule.fits(method, unquote(path)) or not rule.times_left:
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                rule.times_left -= 1
                return rule.fault
        return None

    def hang(self) -> None:
        """Return when the proxy is closed."""
        self.hanging.set()
        self._closing.wait(FORWARD_S_MAX)

    def forward(
        self, method: str, path: str, headers: Any, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Return the server's answer: status, headers, body."""
        assert self._upstream.hostname
        upstream = http.client.HTTPConnection(
            self._upstream.hostname, self._upstream.port, timeout=FORWARD_S_MAX
        )
        try:
            upstream.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name.lower() not in ("expect", "connection"):
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()


class SilentProxy:
    """Forwards bytes to a TCP port of this machine until the host behind it is ``gone``.

    What had been connected then stays connected and hears nothing more, not even a reset, as when
    a host loses its power. Who connects afterwards reaches the host that has come back.
    """

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._lost: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where callers connect, host:port."""
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    def gone(self) -> None:
        """Let nothing through any more on what is connected now."""
        with self._lock:
            self._lost.update(self._ends)

    def count(self) -> int:
        """Return how many connections there have been."""
        with self._lock:
            return len(self._ends) // 2

    def close(self) -> None:
        """Stop listening and break all connections."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(END_S_MAX)
        with self._lock:
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._upstream))
            with self._lock:
                self._ends += (near, far)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    lost = source in self._lost
                if not lost:
                    target.sendall(data)
            with self._lock:
                lost = source in self._lost
            if not lost:
                target.shutdown(socket.SHUT_WR)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients break off in these tests: that is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do(self) -> None:
        """Handle one request, whatever its method."""
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = proxy.take(self.command, self.path)
        match fault:
            case Answer(after=False) | Drop(after=False) | Hang(after=False):
                return self._fail(fault)
            case Delay(delay_s):
                time.sleep(delay_s)
            case Edit(change):
                body = change(body)
        if proxy.checks_parts and not self._is_whole(body):
            return self._fail(Answer(400, "BadDigest"))
        answer = proxy.forward(self.command, self.path, self.headers, body)
        if isinstance(fault, Answer | Drop | Hang):
            return self._fail(fault)
        cut = fault.body_bytes if isinstance(fault, Truncate) else None
        return self._answer(*answer, cut=cut)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do  # noqa: N815

    def _is_whole(self, body: bytes) -> bool:
        said = self.headers.get("x-amz-checksum-crc32")
        return not said or base64.b64decode(said) == zlib.crc32(body).to_bytes(4, "big")

    def _fail(self, fault: Answer | Drop | Hang) -> None:
        if isinstance(fault, Answer):
            said = f"<Error><Code>{fault.code}</Code><Message>so be it</Message></Error>"
            body = said.encode() if fault.code and self.command != "HEAD" else b""
            return self._answer(fault.status, [("Content-Type", "application/xml")], body)
        if isinstance(fault, Hang):
            self.server.proxy.hang()
        return self._break_off()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, cut: int | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        said = [value for name, value in headers if name.lower() == "content-length"]
        length = said[0] if self.command == "HEAD" and said else str(len(body))
        if status not in (204, 304):
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None:
            self._break_off()

    def _break_off(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client was faster
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

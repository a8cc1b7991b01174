"""Notices that a node will be taken away come from files and HTTP endpoints."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from holdfast.errors import InvalidRequestError
from holdfast.launcher.notices import AWS, FileNotice, HttpNotice, NoticeWatch, source

WAIT_S_MAX = 30.0


class Endpoint(ThreadingHTTPServer):
    """Answers with ``code`` and ``text``; ``asked`` has each request's method and headers."""

    def __init__(self):
        self.code, self.text, self.asked = 404, b"", []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/notice"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(("GET", dict(self.headers)))
        self.send_response(self.server.code)
        self.end_headers()
        self.wfile.write(self.server.text)

    def do_PUT(self):
        self.server.asked.append(("PUT", dict(self.headers)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"a-token")

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint():
    server = Endpoint()
    yield server
    server.shutdown()
    server.server_close()


def test_a_file_gives_notice_once_it_is_there(tmp_path):
    notice = FileNotice(tmp_path / "notice")
    assert notice.notice() is None
    notice.path.write_text("maintenance at noon\nmore\n")
    assert notice.notice() == "maintenance at noon"
    notice.path.write_text("")
    assert notice.notice() == f"{notice.path} is there"


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (404, b"not found", None),
        (200, b"FALSE\n", None),
        (200, b"NONE", None),
        (200, b"", None),
        (200, b"TRUE", "TRUE"),
        (200, b'{"action": "terminate"}', '{"action": "terminate"}'),
        (200, b"x" * 9000, "x" * 200),
    ],
)
def test_an_endpoint_gives_notice_by_what_it_answers(endpoint, code, text, said):
    endpoint.code, endpoint.text = code, text
    assert HttpNotice(endpoint.url).notice() == said


def test_a_token_is_asked_for_first(endpoint):
    endpoint.code, endpoint.text = 200, b"soon"
    assert HttpNotice(endpoint.url, token_url=endpoint.url).notice() == "soon"
    [put, get] = endpoint.asked
    assert put[0] == "PUT"
    assert get[1]["X-Aws-Ec2-Metadata-Token"] == "a-token"


def test_an_endpoint_that_fails_is_no_notice(endpoint):
    endpoint.code = 500
    with pytest.raises(OSError, match="500"):
        HttpNotice(endpoint.url).notice()


def test_the_first_notice_is_told_once_and_failures_once(endpoint, tmp_path):
    endpoint.code = 500
    told, failed, given = [], [], threading.Event()

    def give(reason):
        told.append(reason)
        given.set()

    heard = threading.Event()
    watch = NoticeWatch(
        [
            FileNotice(tmp_path / "a", interval_s=0.01),
            FileNotice(tmp_path / "b", interval_s=0.01),
            HttpNotice(endpoint.url, interval_s=0.01),
        ],
        give,
        lambda text: (failed.append(text), heard.set()),
    )
    assert heard.wait(WAIT_S_MAX)
    (tmp_path / "a").write_text("now")
    (tmp_path / "b").write_text("now")
    assert given.wait(WAIT_S_MAX)
    watch.close()
    assert told == ["now"]
    assert len(failed) == 1
    assert "cannot be asked" in failed[0]


def test_sources_are_named():
    assert source("file:/run/notice").path.name == "notice"
    assert source("http://10.0.0.1/x").url == "http://10.0.0.1/x"
    assert source("aws").token_url == f"{AWS}/api/token"
    assert source("gcp").headers == {"Metadata-Flavor": "Google"}


@pytest.mark.parametrize("text", ["", "file:", "ftp://x", "http://", "azure", "/run/notice"])
def test_anything_else_is_refused(text):
    with pytest.raises(InvalidRequestError, match="pass file:PATH"):
        source(text)

"""What doctor makes of whoever answers where REST should be."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import pytest

from holdfast.cli import probes

DATE = "Date: Sun, 22 Nov 2026 14:00:00 GMT\r\n"


@contextmanager
def answering(text: str):
    """A server that answers its first caller with these bytes; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as caller:
                caller.recv(65536)
                caller.sendall(text.encode())

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        thread.join()


def page(status: str, body: str) -> str:
    return f"HTTP/1.1 {status}\r\n{DATE}Content-Length: {len(body)}\r\n\r\n{body}"


@pytest.mark.parametrize(
    ("answer", "unready"),
    [
        (page("200 OK", "{}"), ""),
        (page("503 Away", '{"detail": "no write for 9 s"}'), "no write for 9 s"),
        (page("500 Broken", "<html>"), "HTTP Error 500: Broken"),
        (page("500 Broken", "[1]"), "HTTP Error 500: Broken"),
        ("HTTP/1.1 503 Away\r\nContent-Length: 99\r\n\r\n{", "HTTP Error 503: Away"),
        ("SSH-2.0-OpenSSH\r\n", ""),
        ("", ""),
    ],
)
def test_an_answer_is_a_reason_or_nobodys(answer, unready):
    with answering(answer) as url:
        skew_s, found = probes._ask_rest(url)

    assert found == unready
    assert (skew_s is not None) == (DATE in answer)


def test_silence_is_said_and_a_closed_port_is_not(monkeypatch):
    """A service that hangs is no help; one that is not reached from here may be well."""
    monkeypatch.setattr(probes, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        assert "does not say within" in probes._ask_rest(url)[1]
    assert probes._ask_rest(url) == (None, "")

"""The status page in a real browser: what others chose is text there, never markup."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "services" / "holdfast_services" / "metadata" / "edges" / "page" / "index.html"
EVIL = "<img src=x onerror=\"document.title='taken'\">"
SHOWN_S_MAX = 60.0

_spec = importlib.util.spec_from_file_location("page_browser", Path(__file__).parent / "browser.py")
browser = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser)

RESTORE = {"number": 1, "state": "lost", "fresh": False, "step": 1, "reason": EVIL}
JOB = {
    "job": EVIL,
    "run": EVIL,
    "attempt": 1,
    "generation": 1,
    "world_size": 1,
    "running": True,
    "holder": EVIL,
    "replicas": 1,
    "replicas_allowed": 1,
    "shortage": "",
    "step": 1,
    "newest_step": 1,
    "newest_replicated_step": 1,
    "restore": RESTORE,
    "saves_every_s": 1.0,
    "saves_why": EVIL,
}
COPY = {"node": EVIL, "tier": EVIL}
CHECKPOINT = {
    "job": EVIL,
    "step": 1,
    "attempt": 1,
    "generation": 1,
    "level": EVIL,
    "superseded": False,
    "pinned": True,
    "pin_note": EVIL + '" onmouseover="document.title=1',
    "held": [EVIL],
    "kept": True,
    "world_size": 1,
    "length_bytes": 1,
    "local_at": 1.0,
    "replicated_at": 1.0,
    "durable_at": 1.0,
    "draining": False,
    "stored_shards": None,
    "expired_at": None,
    "bad": False,
    "folder": EVIL,
    "copies_min": 1,
    "nodes": [EVIL],
    "shards": [{"rank": 0, "owner": EVIL, "bad": True, "replicas": [COPY]}],
    "line": [
        {
            "attempt": 1,
            "parent": {"step": 1, "attempt": 1},
            "rollback": {"at": 1.0, "holder": EVIL, "reason": EVIL},
            "commit": EVIL,
            "dirty": True,
            "command": EVIL,
            "user": EVIL,
        }
    ],
}
VERDICT = {"step": 1, "attempt": 1, "generation": 1, "keep": False, "why": EVIL}
STORE = {
    "url": EVIL,
    "ok": False,
    "error": EVIL,
    "durable": 1,
    "durable_bytes": 1,
    "draining": 1,
    "expired": 1,
    "bad": 1,
    "queue_waiting": None,
}
NODE = {
    "node": EVIL,
    "live": True,
    "lease_s": 1.0,
    "domain": EVIL,
    "budget_bytes": 2,
    "used_bytes": 1,
    "shards": 1,
    "ranks": 1,
}
EVENT = {"id": 1, "at": 1.0, "kind": EVIL, "severity": EVIL, "message": EVIL, "node": EVIL}


class Hostile(BaseHTTPRequestHandler):
    """Serves the page, and our documents with every free text replaced by markup."""

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/":
            return self._send("text/html", PAGE.read_bytes())
        if path.endswith("/events"):
            return self._send("text/event-stream", f"data: {json.dumps(EVENT)}\n\n".encode())
        if path.endswith("/checkpoints/1"):
            return self._json(CHECKPOINT)
        answers = {
            "/checkpoints": [CHECKPOINT],
            "/collect": [VERDICT],
            "/v1/jobs": [JOB],
            "/v1/nodes": [NODE],
            "/v1/store": STORE,
        }
        return self._json(next((a for end, a in answers.items() if path.endswith(end)), []))

    def log_message(self, *_):
        """Say nothing."""

    def _json(self, value):
        self._send("application/json", json.dumps(value).encode())

    def _send(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def address():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.timeout(700)  # a bare machine installs the browser first
def test_names_and_texts_of_others_are_shown_and_never_executed(address, tmp_path, chromium):
    """P9: jobs, nodes, levels, reasons and events that are markup stay text."""
    with browser.Browser(chromium, str(tmp_path / "profile")) as page:
        page.open(address)
        ends = time.monotonic() + SHOWN_S_MAX
        while not page.value("document.querySelectorAll('.job, .node, #events li').length >= 3"):
            assert time.monotonic() < ends, page.value("document.body?.innerText")
            time.sleep(0.05)

        assert page.value("document.querySelectorAll('main img').length") == 0
        assert page.value("document.title") == "Holdfast"
        assert page.value("document.querySelector('.job h2').textContent") == EVIL
        assert EVIL in page.value("document.querySelector('#nodes').textContent")
        assert EVIL in page.value("document.querySelector('#events').textContent")
        assert EVIL in page.value("document.querySelector('#store').textContent")
        assert EVIL in page.value("document.querySelector('.why').textContent")
        assert EVIL in page.value("document.querySelector('.origin').textContent")
        assert EVIL in page.value("document.querySelector('.pace').textContent")
        assert page.value("document.querySelectorAll('[onmouseover]').length") == 0

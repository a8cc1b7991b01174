"""moto: an S3 server in Python with Amazon's semantics, slow, that lets everybody in.

As it comes it looks whether a name is taken and writes in two steps, on many threads, so that of
several that want the name several may get it; S3 gives it to one. Here such requests go one by one.
``python -m tests.servers.moto PORT`` serves until it is ended.
"""

from __future__ import annotations

import io
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.processes import Children, free_port
from tests.servers.s3 import S3Server

START_S_MAX = 60.0


@contextmanager
def running_moto() -> Iterator[S3Server]:
    """Run a server; it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hfmoto"))
    children, port = Children(folder), free_port()
    try:
        children.start("moto", sys.executable, "-m", "tests.servers.moto", str(port))
        children.wait("moto", lambda: _listens(port), start_s_max=START_S_MAX)
        yield S3Server(
            f"http://127.0.0.1:{port}",
            {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret"},
        )
    finally:
        children.end()
        shutil.rmtree(folder, ignore_errors=True)


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        connection.settimeout(5)
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _serve(port: int) -> None:
    # For the server's own process: these imports take a second.
    from moto.moto_server import werkzeug_app as app
    from werkzeug.serving import run_simple

    application, turn = app.DomainDispatcherApplication(app.create_backend_app), threading.Lock()

    def one_by_one(request: dict[str, Any], answer: Any) -> Any:
        if "HTTP_IF_NONE_MATCH" not in request:
            return application(request, answer)
        # A caller that stops in the middle must not keep the turn.
        body = request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
        with turn:
            return application({**request, "wsgi.input": io.BytesIO(body)}, answer)

    run_simple("127.0.0.1", port, one_by_one, threaded=True, request_handler=app.MotoRequestHandler)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

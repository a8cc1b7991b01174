"""moto: an S3 server in Python with Amazon's semantics, slow, that lets everybody in."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.processes import Children, free_port
from tests.servers.s3 import S3Server

START_S_MAX = 60.0


@contextmanager
def running_moto() -> Iterator[S3Server]:
    """Run a server; it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hfmoto"))
    children, port = Children(folder), free_port()
    try:
        children.start(
            "moto", sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)
        )
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

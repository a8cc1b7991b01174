"""A folder with a short name, since sockets lie there, and a cluster that leaves nothing behind."""

import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from tests.integration.launcher.harness import Cluster, until


@pytest.fixture
def cluster():
    # A launcher leaves alone what is ignored, as it is in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="hf-"))
    made = Cluster(folder)
    try:
        yield made
    finally:
        made.close()
        until(lambda: not made.left(), "no process is left")
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGINT, before)

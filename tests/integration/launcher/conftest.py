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
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGQUIT: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    folder = Path(tempfile.mkdtemp(prefix="hf-"))
    made = Cluster(folder)
    try:
        yield made
    finally:
        made.close()
        until(lambda: not made.left(), "no process is left")
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)

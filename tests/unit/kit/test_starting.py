"""A service's process ends with the code of its ``main``, and with all that it said."""

import subprocess
import sys

import pytest

SERVICE = """
import gc, logging, logging.handlers, sys, threading
was_on = gc.isenabled()
terminal = logging.StreamHandler(sys.stderr)
logging.basicConfig(handlers=[logging.handlers.MemoryHandler(1000, target=terminal)])

def main():
    print("collected", was_on, gc.isenabled(), sys.argv[1:])
    logging.warning("logged")
    threading.Thread(target=threading.Event().wait).start()
    return 3
"""
START = "from holdfast_services.kit.starting import start; start('service')"


@pytest.fixture
def ended(tmp_path):
    (tmp_path / "service.py").write_text(SERVICE)
    return subprocess.run(
        [sys.executable, "-c", START, "told"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_service_imports_without_collections_and_runs_with_them(ended):
    assert ended.stdout == "collected False True ['told']\n", ended.stderr


def test_a_service_ends_with_its_code_though_a_thread_hangs(ended):
    assert (ended.returncode, ended.stderr) == (3, "logged\n")

"""Chooses and seeds: a clean environment, and a marker for each test by its folder."""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
KINDS = ("unit", "contract", "property", "golden", "tidy", "integration", "crash", "e2e", "bench",
         "simulation", "rdma")  # fmt: skip

pytest_plugins = ["tests.servers.plugin"]

for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
    if not name.startswith("HOLDFAST_TEST_"):  # which servers to test against
        del os.environ[name]

# The processes that tests start keep the bytecode they make: the next ones need not make it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    if not config.option.hypothesis_seed:
        config.option.hypothesis_seed = str(secrets.randbelow(1 << 32))  # workers get it, too
    for kind in KINDS:
        config.addinivalue_line("markers", f"{kind}: lies in tests/{kind}")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage meanwhile: there is none, and a tenth of the time goes into it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        kind = item.path.relative_to(HERE).parts[0]
        if kind in KINDS:
            item.add_marker(getattr(pytest.mark, kind))
        if item.get_closest_marker("rdma") and "HOLDFAST_TEST_RDMA" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="runs where RDMA is: make test-rdma"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what makes the property tests draw the same again."""
    seed = terminalreporter.config.option.hypothesis_seed
    terminalreporter.write_line(f"property tests: --hypothesis-seed={seed}")

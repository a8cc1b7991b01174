"""Real databases: SQLite files, and databases of a Postgres server for the session."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from tests.servers.packages import install
from tests.servers.postgres import running_postgres


@pytest.fixture(scope="module")
def own_postgres():
    """A server that tests may stop and start: nobody else has it."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def own_url(own_postgres):
    return own_postgres.url(own_postgres.create())


@pytest.fixture(scope="session")
def chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    if not any(map(shutil.which, names)):
        install("chromium")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.fail("no Chromium: apt-get install chromium")
    return found


@pytest.fixture
def mounted():
    """``mounted(folder, "size=8m")``: make the folder a tmpfs of its own until the test's end."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folders = []

    def mount(folder, options):
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no mounting here: {done.stderr}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'catalogue.db'}"
    return request.getfixturevalue("postgres_url")

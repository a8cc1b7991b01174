"""Real databases: SQLite files and one Postgres server for the session, started without root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.servers.packages import install

START_S_MAX = 60


@dataclass
class PostgresServer:
    """A server of our own on a unix socket; ``start`` and ``stop`` may be repeated."""

    binaries: Path
    folder: Path

    def init(self):
        self._run(
            "initdb", "-D", self.data, "-U", "holdfast", "-A", "trust", "-E", "UTF8", "--no-sync"
        )

    @property
    def data(self):
        return self.folder / "data"

    def start(self):
        options = (
            f"-k {self.folder} -c listen_addresses='' -c fsync=off "
            "-c full_page_writes=off -c max_connections=60"
        )
        self._run(
            "pg_ctl",
            "-D",
            self.data,
            "-w",
            "-t",
            str(START_S_MAX),
            "-l",
            self.folder / "log",
            "-o",
            options,
            "start",
        )

    def stop(self):
        self._run("pg_ctl", "-D", self.data, "-w", "-m", "immediate", "stop")

    def url(self, database):
        return f"postgresql+psycopg://holdfast@/{database}?host={self.folder}"

    def create(self):
        name = f"t{uuid.uuid4().hex[:12]}"
        self._run("createdb", "-h", self.folder, "-U", "holdfast", name)
        return name

    def drop(self, name):
        self._run("dropdb", "-h", self.folder, "-U", "holdfast", "--force", name)

    def _run(self, program, *arguments):
        # Postgres refuses root: inside a user namespace of its own it is somebody else.
        wrap = ["unshare", "-U", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []
        command = [*wrap, str(self.binaries / program), *map(str, arguments)]
        with tempfile.TemporaryFile() as output:  # a pipe would be kept open by the server
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=START_S_MAX, check=False
            )
            output.seek(0)
            assert done.returncode == 0, output.read().decode(errors="replace")


def _binaries():
    """Where initdb lies; the package is installed when it is missing."""
    if _find_binaries() is None:
        install("postgresql")
    found = _find_binaries()
    if found is None:
        pytest.fail("no Postgres: install it so that initdb is on PATH or in /usr/lib/postgresql")
    return found


def _find_binaries():
    packaged = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    folders = [*packaged, *([Path(on_path).parent] if on_path else [])]
    needed = ("initdb", "pg_ctl", "postgres", "createdb", "dropdb")
    return next((f for f in folders if all((f / name).exists() for name in needed)), None)


@pytest.fixture(scope="session")
def postgres():
    folder = Path(tempfile.mkdtemp(prefix="hfpg", dir="/tmp"))
    server = PostgresServer(_binaries(), folder)
    server.init()
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


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
def postgres_url(postgres):
    name = postgres.create()
    yield postgres.url(name)
    postgres.drop(name)


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'catalogue.db'}"
    return request.getfixturevalue("postgres_url")

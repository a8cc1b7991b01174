"""A Postgres server of our own in a folder, started without root, reached by a unix socket."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.packages import install

START_S_MAX = 60


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A server of our own on a unix socket; ``start`` and ``stop`` may be repeated."""

    binaries: Path
    folder: Path

    def init(self) -> None:
        """Make the data."""
        self._run(
            "initdb", "-D", self.data, "-U", "holdfast", "-A", "trust", "-E", "UTF8", "--no-sync"
        )

    @property
    def data(self) -> Path:
        """Where its data lie."""
        return self.folder / "data"

    def start(self) -> None:
        """Start it; return once it answers."""
        options = (
            f"-k {self.folder} -c listen_addresses='' -c fsync=off "
            "-c full_page_writes=off -c max_connections=60"
        )
        self._run(
            "pg_ctl", "-D", self.data, "-w", "-t", str(START_S_MAX), "-l", self.folder / "log",
            "-o", options, "start",
        )  # fmt: skip

    def stop(self) -> None:
        """End it as a crash does."""
        self._run("pg_ctl", "-D", self.data, "-w", "-m", "immediate", "stop")

    def url(self, database: str) -> str:
        """Return the URL of a database, as ``make_engine`` takes it."""
        return f"postgresql+psycopg://holdfast@/{database}?host={self.folder}"

    def create(self) -> str:
        """Make a database of a new name."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self._run("createdb", "-h", self.folder, "-U", "holdfast", name)
        return name

    def drop(self, name: str) -> None:
        """Remove a database, whoever uses it."""
        self._run("dropdb", "-h", self.folder, "-U", "holdfast", "--force", name)

    def _run(self, program: str, *arguments: str | Path) -> None:
        # Postgres refuses root: inside a user namespace of its own it is somebody else.
        wrap = ["unshare", "-U", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []
        command = [*wrap, str(self.binaries / program), *map(str, arguments)]
        with tempfile.TemporaryFile() as output:  # a pipe would be kept open by the server
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=START_S_MAX, check=False
            )
            output.seek(0)
            assert done.returncode == 0, output.read().decode(errors="replace")


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Run a server; it and its folder are gone afterwards."""
    server = PostgresServer(_binaries(), Path(tempfile.mkdtemp(prefix="hfpg", dir="/tmp")))
    try:
        server.init()
        server.start()
        yield server
    finally:
        if (server.data / "postmaster.pid").exists():
            server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)


def _binaries() -> Path:
    """Where initdb lies; the package is installed when it is missing."""
    if _find_binaries() is None:
        install("postgresql")
    found = _find_binaries()
    if found is None:
        raise AssertionError("no Postgres: put initdb on PATH or in /usr/lib/postgresql")
    return found


def _find_binaries() -> Path | None:
    packaged = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    folders = [*packaged, *([Path(on_path).parent] if on_path else [])]
    needed = ("initdb", "pg_ctl", "postgres", "createdb", "dropdb")
    return next((f for f in folders if all((f / name).exists() for name in needed)), None)

"""A Docker engine of our own, with images that are made on this machine: no registry is asked.

Its folder, images included, is kept in the cache: a second session makes only what has changed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.packages import install
from tests.servers.processes import Children

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast/docker"
PACKAGES = ("docker.io", "docker-compose", "iptables", "debootstrap")
PROGRAMS = ("docker", "dockerd", "docker-compose", "iptables", "debootstrap")
SUITE = "bookworm"
PYTHON = "holdfast-test/python"
"""Debian with Python: what ``PYTHON_IMAGE`` is in the tests."""
MIRROR = "http://deb.debian.org/debian"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
START_S_MAX = 60.0
COMMAND_S_MAX = 900.0


@dataclass(frozen=True, slots=True)
class Engine:
    """How to reach the engine; ``gateway`` is this machine as containers see it."""

    socket: Path
    gateway: str

    @property
    def environment(self) -> Mapping[str, str]:
        """What ``docker`` and ``docker-compose`` must be started with."""
        return {**os.environ, "DOCKER_HOST": f"unix://{self.socket}", "DOCKER_BUILDKIT": "0"}

    def docker(self, *arguments: str | Path, **options: object) -> str:
        """Run ``docker``; return what it prints."""
        return run("docker", *arguments, env=self.environment, **options)

    def ensure_python(self) -> None:
        """Make the image of Debian with Python, unless it is there."""
        if self.docker("images", "-q", PYTHON).strip():
            return
        with tempfile.TemporaryDirectory(prefix="hfroot") as folder:
            root, packed = Path(folder) / "root", Path(folder) / "root.tar"
            wanted = "python3,python3-venv,ca-certificates"
            run("debootstrap", "--variant=minbase", f"--include={wanted}", SUITE, root, MIRROR)
            shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))  # this machine's own
            shutil.rmtree(root / "var/cache/apt/archives")
            with tarfile.open(packed, "w") as archive:
                archive.add(root, arcname="/")
            self.docker("import", "--change", f"ENV PIP_CERT={CERTIFICATES}", packed, PYTHON)


def run(program: str, *arguments: str | Path, **options: object) -> str:
    """Run a program; return its output, fail with it."""
    done = subprocess.run(  # type: ignore[call-overload]
        [program, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=COMMAND_S_MAX, check=False, **options,
    )  # fmt: skip
    assert done.returncode == 0, f"{program} {' '.join(map(str, arguments))}\n{done.stdout}"
    return str(done.stdout)


@contextmanager
def running_docker() -> Iterator[Engine]:
    """Run an engine, one on this machine at a time; its containers are gone afterwards."""
    _bring_programs()
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="hfdk"))
    children = Children(folder)
    engine = Engine(folder / "socket", "10.214.0.1")
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            children.start(
                "dockerd", "dockerd", "--host", f"unix://{engine.socket}", "--data-root",
                CACHE / "data", "--exec-root", folder / "exec", "--pidfile", folder / "pid",
                "--bip", f"{engine.gateway}/24",
                "--default-address-pool", "base=10.213.0.0/16,size=24",
            )  # fmt: skip
            children.wait("dockerd", lambda: _answers(engine), start_s_max=START_S_MAX)
            _remove_containers(engine)
            yield engine
            _remove_containers(engine)
        finally:
            children.end()
            shutil.rmtree(folder, ignore_errors=True)


def _answers(engine: Engine) -> bool:
    asked = ["docker", "version"]
    done = subprocess.run(asked, env=engine.environment, capture_output=True, check=False)
    return done.returncode == 0


def _remove_containers(engine: Engine) -> None:
    """Remove what a session that was killed has left; images stay."""
    if left := engine.docker("ps", "-aq").split():
        engine.docker("rm", "--force", "--volumes", *left)
    engine.docker("volume", "prune", "--force")
    engine.docker("network", "prune", "--force")


def _bring_programs() -> None:
    if not all(map(shutil.which, PROGRAMS)):
        install(*PACKAGES)
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        raise AssertionError(f"no {missing}: apt-get install {' '.join(PACKAGES)}")

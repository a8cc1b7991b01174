"""A worker in a process of its own, as it is run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.persistence.harness import WAIT_S, until

ROOT = Path(__file__).resolve().parents[3]


class WorkerProcess:
    """``python -m holdfast_services.persistence`` in ``folder``; log and ready file lie there."""

    def __init__(self, folder: Path, address: str, store: str, queue: str, **environ: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._ready = folder / "ready.json"
        self._log = folder / "log"
        self.environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT / 'sdk'}:{ROOT / 'services'}",
            "HOLDFAST_ADDRESS": address,
            "HOLDFAST_STORE": store,
            "HOLDFAST_QUEUE": queue,
            "HOLDFAST_READY_FILE": str(self._ready),
            **environ,
        }

    def start(self) -> WorkerProcess:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast_services.persistence"],
                env=self.environ, stdout=log, stderr=log, cwd=self.folder,
            )  # fmt: skip
        until(lambda: self._ready.exists() or self.process.poll() is not None, "ready")
        assert self._ready.exists(), self.log()
        self.ready = json.loads(self._ready.read_text())
        return self

    def log(self) -> str:
        return self._log.read_text()

    def memory_kib(self, field: str) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
        raise AssertionError(field)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)

"""Pretend nodes: on each a launcher that is started again whenever it fails, as on a real one.

Owns the launchers and torchrun's rendezvous store, which must not live in a node that may die.
Everything happens in ``Cluster.poll``: no threads, so that a caller is never surprised.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")
LEASH = Path(__file__).with_name("leash.py")
# A node counts as lost after interval x attempts seconds without a sign of life; the store is ours.
RENDEZVOUS = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3"
LAUNCHES_MAX = 5
LAUNCHERS = ("holdfast run", "torchrun")
STOP_S_MAX = 10.0


class DemoError(Exception):
    """The demo cannot go on; the message says why, ``log`` where to look."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A node of the stack: its name, its agent's socket, the folder of its memory."""

    name: str
    agent: Path
    arena: Path


class Node:
    """One node's launcher, of one rank. ``poll`` starts it again after a failure."""

    def __init__(
        self, spec: NodeSpec, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        self.spec = spec
        self.log = log
        self._command = command
        self._env = {
            **os.environ,
            **env,
            "GLOO_SOCKET_IFNAME": "lo",
            "HOLDFAST_AGENT": str(spec.agent),
            "OMP_NUM_THREADS": "1",
            # A store shared over restarts keeps stale addresses: a fresh one for each attempt.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self._launches = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of the launcher.

        Raises:
            DemoError: it is not running.
        """
        if self._process is None:
            raise DemoError(f"the launcher of {self.spec.name} is not running", self.log)
        return self._process.pid

    def poll(self) -> bool:
        """Return whether the launcher has ended well; start it if it has not, or has failed.

        Raises:
            DemoError: it failed more often than the demo's faults explain.
        """
        code = self._process.poll() if self._process else 1
        if code == 0:
            return True
        if code is not None:
            self._launch()
        return False

    def _launch(self) -> None:
        if self._launches == LAUNCHES_MAX:
            raise DemoError(f"{self.spec.name}: {LAUNCHES_MAX} launchers have failed", self.log)
        self._launches += 1
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(LEASH), "SIGKILL", *self._command],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Kill the launcher; its ranks die with it, because they watch their parent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_S_MAX)


class Cluster:
    """Two or more nodes training one job. A context manager: leaving it leaves nothing behind."""

    def __init__(
        self,
        launcher: str,
        specs: Sequence[NodeSpec],
        script: Sequence[str],
        env: Mapping[str, str],
        out: Path,
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        launch = uuid.uuid4().hex
        self._store: TCPStore | None = None
        if launcher == "torchrun":
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            command = _torchrun(len(specs), launch, self._store.port)
        else:
            command = [*HOLDFAST, "run", "--nnodes", str(len(specs)), "--job", launch]
        env = {**env, "HOLDFAST_LAUNCH": launch}
        self.nodes = [
            Node(spec, [*command, *script], env, out / f"{spec.name}.log") for spec in specs
        ]

    def poll(self) -> bool:
        """Return whether all nodes have finished; restart those that failed."""
        finished = [node.poll() for node in self.nodes]  # all of them, each time
        return all(finished)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()


def _torchrun(nodes: int, launch: str, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=10"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
        *(f"--rdzv-id={launch}", f"--rdzv-conf={RENDEZVOUS}", "--local-addr=127.0.0.1"),
    ]

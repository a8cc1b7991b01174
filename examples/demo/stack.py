"""The embedded stack, as ``holdfast up`` runs it, for as long as the demo lives.

It runs as a child that ends when the demo ends, however that happens, unless it is to be kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from cluster import HOLDFAST, LEASH, DemoError, NodeSpec

START_S_MAX = 60.0
STOP_S_MAX = 15.0
DOWN_S_MAX = 30.0
LEASE_S = "3"  # as long as torchrun waits here for signs of life
POLL_S = 0.05


class Stack:
    """A metadata service and the agents of some nodes. A context manager.

    ``nodes``, ``env`` (what a training process needs to find the stack) and ``rest_url`` are there
    once it has been entered.
    """

    def __init__(self, home: Path, *, nodes: int, keep: bool = False) -> None:
        self._home = home
        self._log = home.with_name("stack.log")
        self._nodes_count = nodes
        self._keep = keep
        self.nodes: list[NodeSpec] = []
        self.env: dict[str, str] = {}
        self.rest_url = ""

    def __enter__(self) -> Self:
        self._home.mkdir(parents=True, exist_ok=True)
        leash = [] if self._keep else [sys.executable, str(LEASH), "SIGTERM"]
        nodes = ("--nodes", str(self._nodes_count))
        up = [*HOLDFAST, "up", "--foreground", "--dir", str(self._home), *nodes]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*leash, *up],
                env={**os.environ, "HOLDFAST_NODE_LEASE_S": LEASE_S},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            facts = self._wait()
        except BaseException:
            self._stop()
            raise
        self.nodes = [
            NodeSpec(name=node["name"], agent=Path(node["agent"]), arena=Path(node["arena"]))
            for node in facts["nodes"]
        ]
        self.env = {"HOLDFAST_HOME": str(self._home), "HOLDFAST_ADDRESS": facts["address"]}
        self.rest_url = facts["rest_url"]
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keep:
            self._stop()

    def _wait(self) -> dict[str, Any]:
        deadline = time.monotonic() + START_S_MAX
        published = self._home / "stack.json"
        while time.monotonic() < deadline and self._process.poll() is None:
            if published.exists():
                facts: dict[str, Any] = json.loads(published.read_text(encoding="utf-8"))
                if facts["pid"] == self._process.pid:
                    return facts
            time.sleep(POLL_S)
        raise DemoError("the stack did not start", self._log)

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its services die with it
            self._process.wait(STOP_S_MAX)
        down(self._home)


def down(home: Path) -> None:
    """Stop whatever stack still runs in ``home`` and give its memory back."""
    command = [*HOLDFAST, "down", "--yes", "--dir", str(home)]
    subprocess.run(command, timeout=DOWN_S_MAX, check=False, capture_output=True)

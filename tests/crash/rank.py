"""Drives trainers for ``test_trainer_sweep``: imports torch once, forks one child per crash.

The driver itself makes no thread and no gRPC object, so that it may fork. Each child restores
what its predecessor left, says what it got, brings two saves to ``local`` and dies in the third.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
import time
import traceback
from dataclasses import astuple
from typing import Any

import torch
import torch._dynamo  # else the first optimizer of each child imports it, for a second
from tests.crash.operations import Point, Sweep, common
from torch import nn

import holdfast
import holdfast.checkpointer
from holdfast.copying.copier import HostCopier
from holdfast.snapshot import engine

JOB = "sweep"
WIDTH = 256
LOCAL_S_MAX = 30.0
TRIES = 4


class Training:
    """A small model whose parameters, optimizer state and buffers differ in every step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state: dict[str, object] = {"model": self.model, "optimizer": self.optimizer}

    def update(self) -> None:
        """Make one step of training."""
        loss = self.model(torch.randn(8, WIDTH)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def fingerprint(self) -> str:
        """Return a digest over all that is saved, random state included."""
        digest = hashlib.sha256()
        tensors = list(self.model.state_dict().values())
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                held = self.optimizer.state[parameter]
                tensors += [held[name] for name in sorted(held)]
        for tensor in (*tensors, torch.get_rng_state()):
            digest.update(tensor.detach().numpy().tobytes())
        digest.update(repr(random.getstate()).encode())
        return digest.hexdigest()


class Life:
    """One child: what it restored, which fingerprints its steps had, which operations it made."""

    def __init__(self, point: Point | None, reports: int) -> None:
        self._sweep = Sweep(point)
        self._reports = reports

    def say(self, **facts: Any) -> None:
        """Tell the driver, at once: this process is about to die."""
        os.write(self._reports, json.dumps(facts).encode() + b"\n")

    def live(self) -> None:
        """Restore, save twice for sure, then save once more and die on the way."""
        self._sweep.install()
        # What is neither a system call nor an RPC, but writes into the slot.
        self._sweep.wrap(HostCopier, "now", "copy tensors")
        self._sweep.wrap(HostCopier, "later", "copy tensors")
        self._sweep.wrap(engine.SlotBuffer, "write", "write blob")
        self._sweep.wrap(engine.SlotBuffer, "write_header", "write header")
        training = Training()
        ck = holdfast.Checkpointer(JOB, training.state, save=holdfast.Never(), replicas=0)
        restored = ck.restore()
        step = restored.step if restored else 0
        self.say(restored=step, fingerprint=training.fingerprint() if restored else "")
        for _ in range(2):
            step += 1
            training.update()
            self.say(step=step, fingerprint=training.fingerprint())
            ck.save(step).wait("local", timeout_s=LOCAL_S_MAX)
        training.update()
        self.say(step=step + 1, fingerprint=training.fingerprint())
        self.say(armed=step + 1)
        self._sweep.arm()
        handle = ck.save(step + 1)
        training.update()  # the gate holds it back until the copy has ended
        handle.wait("local", timeout_s=LOCAL_S_MAX)
        self._wait_for("lock")  # of the slot that the save before gave back: the last of its work
        self._sweep.armed = False
        self.say(log=[astuple(reached) for reached in self._sweep.log])

    def _wait_for(self, operation: str) -> None:
        until_s = time.monotonic() + LOCAL_S_MAX
        while not any(reached.label.split()[0] == operation for reached in self._sweep.log):
            assert time.monotonic() < until_s, f"no {operation} after the save"
            time.sleep(0.01)


def child(point: Point | None) -> tuple[bool, list[dict[str, Any]]]:
    """Return whether a child was killed, and all that it said before."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            Life(point, writer).live()
        except BaseException:
            os.write(writer, json.dumps({"failed": traceback.format_exc()}).encode() + b"\n")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = [json.loads(line) for line in stream]
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status), said


def died_at(point: Point) -> list[list[dict[str, Any]]]:
    """Let children live until one died at ``point``; threads may have merged two views."""
    lives = []
    for _ in range(TRIES):
        killed, said = child(point)
        lives.append([*said, {"point": str(point), "killed": killed}])
        if killed:
            break
    return lives


def main() -> None:
    """Find the operations of a save, then crash at each; print one JSON list of lives."""
    assert threading.active_count() == 1, "threads do not survive a fork"
    logs = []
    lives: list[list[dict[str, Any]]] = []
    for _ in range(2):
        _, said = child(None)
        lives.append(said)
        logs += [[Point(*entry) for entry in one["log"]] for one in said if "log" in one]
    points = common(logs)
    for point in points:
        lives += died_at(point)
    _, said = child(None)  # restores what the last of them left
    lives.append(said)
    print(json.dumps({"points": [str(point) for point in points], "lives": lives}))


if __name__ == "__main__":
    main()

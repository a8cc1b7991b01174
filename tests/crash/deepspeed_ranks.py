"""Two ranks bring a save of DeepSpeed's plug into a folder, and one of them dies at each operation.

``python -m tests.crash.deepspeed_ranks FOLDER new|again|renames RANK`` prints a line of JSON for
each death. The parent imports torch once and never makes a thread, so that it may fork.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import torch
import torch.distributed as dist
from tests.crash.operations import Point, Sweep, common

import holdfast
from holdfast.format.boxes import whole
from holdfast.format.segment import TensorSpec
from holdfast.integrations.deepspeed import placing
from holdfast.integrations.deepspeed.board import Board
from holdfast.integrations.deepspeed.committing import Part, Save, commit, run_of
from holdfast.objectstore.directory import DirectoryStore
from holdfast.oneshot.world import World

LAUNCH = "a" * 24
OPERATIONS = (
    *((DirectoryStore, name) for name in ("begin", "put_part", "finish", "put", "delete", "abort")),
    *((placing, name) for name in ("exchange", "write_latest", "discard")),
    (Board, "tell"),
    (shutil, "rmtree"),
)


def save(folder: Path, number: int, tag: str) -> Save:
    markers = ("mp_rank_00_model_states.pt",)
    return Save(run_of(LAUNCH, number), str(folder), tag, latest=True, markers=markers)


def part(rank: int, size: int, value: float) -> Callable[[], Part]:
    """Each rank has a tensor of its own, so that a checkpoint of one rank is none."""
    spec = TensorSpec(fqn=f"w{rank}", dtype="F32", shape=(3,), box=whole((3,)))
    tree = {f"w{r}": {"$ref": f"w{r}"} for r in range(size)}
    return lambda: Part([spec], [torch.full((3,), value + rank)], {"tree": tree})


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Ranks:
    """Saves with two ranks into ``folder``, where the checkpoint ``a`` lies, as ``tag``."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.words, self.kind = folder / "saves", folder / "words", kind
        self.counted = folder / "counted"
        self.tag = "b" if kind == "new" else "a"

    def first(self) -> None:
        """Make the checkpoint that is there before."""
        pids = [fork(lambda rank=rank: self._save(rank, 1, "a", 1.0)) for rank in range(2)]
        assert [0, 0] == [ended(pid) for pid in pids]

    def again(self, dying: int, point: Point | None) -> int:
        """Save as ``tag``; ``dying`` dies at ``point``, and the launcher ends the other."""
        self.words.unlink(missing_ok=True)
        pids = [fork(lambda rank=rank: self._swept(rank, dying, point)) for rank in range(2)]
        code = ended(pids[dying])
        if code and not (dying == 1 and self._has_told()):  # rank 0 goes on if it has all it needs
            os.kill(pids[1 - dying], signal.SIGKILL)
        ended(pids[1 - dying])
        return code

    def _has_told(self) -> bool:
        """Tell whether rank 1 said what it has; a store whose ranks have all ended has no file."""
        try:
            return f"{run_of(LAUNCH, 2)}/1".encode() in self.words.read_bytes()
        except FileNotFoundError:
            return False

    def found(self) -> dict[str, object]:
        """Return what ``latest`` names, what it has, and what is there after the next save."""
        report = self.folder.parent / "found"
        assert ended(fork(lambda: self._look(report))) == 0
        return dict(json.loads(report.read_text()))

    def _look(self, report: Path) -> None:
        latest = (self.folder / "latest").read_text()
        found: dict[str, object] = {"latest": latest}
        placing.recover(self.folder / latest)
        found["values"] = _loaded(self.folder / latest)
        commit(save(self.folder, 3, latest), World(0, 1), None, part(0, 1, 9.0))
        found["left"] = sorted(p.name for p in self.folder.iterdir() if p.name.startswith("."))
        found["next"] = _loaded(self.folder / latest)
        report.write_text(json.dumps(found))

    def _swept(self, rank: int, dying: int, point: Point | None) -> None:
        if self.kind == "renames":
            placing.exchange = lambda *_: False
        sweep = Sweep(point if rank == dying else None)
        renames = [(os, "rename")] if self.kind == "renames" else []
        for owner, name in (*OPERATIONS, *renames):
            sweep.wrap(owner, name, name)
        sweep.arm()
        self._save(rank, 2, self.tag, 2.0)
        sweep.armed = False
        if rank == dying:
            self.counted.write_text(json.dumps([astuple(at) for at in sweep.log]))

    def _save(self, rank: int, number: int, tag: str, value: float) -> None:
        words = dist.FileStore(str(self.words), 2)
        commit(save(self.folder, number, tag), World(rank, 2), words, part(rank, 2, value))


def _loaded(folder: Path) -> list[float]:
    state: dict[str, object] = {}
    holdfast.load(folder, state)
    tree = state["tree"]
    assert isinstance(tree, dict)
    return [float(v) for name in sorted(tree) for v in tree[name].unique()]


def main(folder: Path, kind: str, dying: int) -> None:
    base = Ranks(folder / "base", kind)
    base.folder.mkdir(parents=True)
    base.first()

    def fresh() -> Ranks:
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(folder / "base", folder / "run")
        return Ranks(folder / "run", kind)

    logs = []
    for _ in range(2):
        ranks = fresh()
        assert ranks.again(dying, None) == 0
        logs.append([Point(*at) for at in json.loads(ranks.counted.read_text())])
    points = common(logs)
    if kind == "renames":  # before, it is as with an exchange
        points = points[[point.label for point in points].index("exchange") :]
    for point in [*(p for p in points if not p.after), points[-1]]:
        ranks = fresh()
        code = ranks.again(dying, point)
        print(json.dumps({"point": str(point), "code": code, **ranks.found()}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

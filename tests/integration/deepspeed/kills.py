"""Ranks of a training with DeepSpeed die while they save; then others load what ``latest`` names.

``python kills.py FOLDER`` prints a line of JSON for each death and each number of ranks that load.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
import trainings as t
from tests.crash.operations import Point, Sweep

from holdfast.integrations import deepspeed as ours
from holdfast.integrations.deepspeed import placing
from holdfast.integrations.deepspeed.board import Board
from holdfast.objectstore.directory import DirectoryStore

BASE = Path(sys.argv[1])
SAVED, LOADED = 2, (2, 3)
DEATHS = {
    "rank 0 before its payload": (0, "b", Point("begin", 0, after=False)),
    "rank 0 after its payload": (0, "b", Point("put_part", 0, after=True)),
    "rank 0 before the manifest": (0, "b", Point("put", 2, after=False)),
    "rank 0 after the manifest": (0, "b", Point("put", 2, after=True)),
    "rank 0 after latest": (0, "b", Point("write_latest", 0, after=True)),
    "rank 0 with the tag again, after the manifest": (0, "a", Point("put", 2, after=True)),
    "rank 0 with the tag again, in its place": (0, "a", Point("exchange", 0, after=True)),
    "rank 0 with the tag again, between two renames": (0, "a", Point("rename", 0, after=True)),
    "rank 1 before its payload": (1, "b", Point("begin", 0, after=False)),
    "rank 1 with the tag again, after its payload": (1, "a", Point("put_part", 0, after=True)),
    "rank 1 once it has told": (1, "b", Point("tell", 0, after=True)),
}
"""Who dies, while it saves as what, and where: see ``tests/crash`` for every operation."""


def folder_of(death):
    return BASE / death.replace(" ", "-").replace(",", "")


def first(rank):
    engine = t.make(2)
    t.train(engine, range(2))
    engine.save_checkpoint(str(BASE / "base"), tag="a")
    truth = t.truth(engine)
    if rank == 0:
        torch.save(truth, BASE / "before")
    ours.wait(engine)


def dying(death):
    who, tag, point = DEATHS[death]

    def work(rank):
        engine = t.make(2, seed=5)
        engine.load_checkpoint(str(folder_of(death)))
        t.train(engine, range(2, 4))
        truth = t.truth(engine)
        if rank == 0:
            torch.save(truth, BASE / "after")
        sweep = Sweep(point if rank == who else None)
        owners = dict.fromkeys(("begin", "put_part", "put"), DirectoryStore)
        owners |= {"exchange": placing, "write_latest": placing, "tell": Board, "rename": Path}
        if point.label == "rename":  # as on NFS
            placing.exchange = lambda *_: False
        for name, owner in owners.items():
            sweep.wrap(owner, name, name)
        sweep.arm()
        engine.save_checkpoint(str(folder_of(death)), tag=tag)
        ours.wait(engine)

    group = BASE / f"group-{os.urandom(4).hex()}"
    pids = []
    for rank in range(SAVED):
        pids.append(os.fork())
        if pids[-1] == 0:
            os._exit(t._rank(rank, SAVED, work, group))
    code = os.waitstatus_to_exitcode(os.waitpid(pids[who], 0)[1])
    if point.label != "tell":  # as a launcher does; here rank 0 has all it needs
        os.kill(pids[1 - who], signal.SIGKILL)
    os.waitpid(pids[1 - who], 0)
    return code


def loading(codes):
    def work(rank):
        engine = t.make(2, seed=5)
        truths = {name: torch.load(BASE / name, weights_only=False) for name in ("before", "after")}
        for death, code in codes.items():
            engine.load_checkpoint(str(folder_of(death)))
            found = t.truth(engine)
            same = [name for name, truth in truths.items() if not t.differences(truth, found)]
            if rank == 0:
                latest = (folder_of(death) / "latest").read_text()
                size = torch.distributed.get_world_size()
                line = {"death": death, "code": code, "latest": latest, "same": same, "size": size}
                print(json.dumps(line), file=sys.__stderr__, flush=True)

    return work


def main():
    ours.install()
    if sum(t.run(SAVED, first, BASE)):
        sys.exit("the first save failed")
    codes = {}
    for death in DEATHS:
        shutil.copytree(BASE / "base", folder_of(death))
        codes[death] = dying(death)
    for size in LOADED:
        if sum(t.run(size, loading(codes), BASE)):
            sys.exit(f"{size} ranks could not load")


os.dup2(2, 1)  # deepspeed prints
main()

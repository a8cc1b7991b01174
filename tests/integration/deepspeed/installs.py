"""Installs in one of the orders that a script may have, trains with one rank, saves and loads.

``python installs.py FOLDER before|after|twice`` prints what was found, as JSON.
"""

import json
import os
import sys
from pathlib import Path

from holdfast.integrations import deepspeed as ours

FOLDER, ORDER = Path(sys.argv[1]), sys.argv[2]
KNOWN = "deepspeed" in sys.modules
if ORDER != "after":
    ours.install()

import trainings as t  # noqa: E402 - imports deepspeed

if ORDER != "before":
    ours.install(on_failure="raise")


def work(_rank):
    engine = t.make(2)
    t.train(engine, range(2))
    engine.save_checkpoint(str(FOLDER / "saves"))
    before = t.truth(engine)
    ours.wait(engine)
    again = t.make(2, seed=5)
    again.load_checkpoint(str(FOLDER / "saves"))
    found = {
        "known": KNOWN,
        "engine": type(engine.checkpoint_engine).__name__,
        "on_failure": engine.checkpoint_engine._on_failure,
        "saves": engine.checkpoint_engine._saves_count,
        "differences": t.differences(before, t.truth(again)),
        "pickles": [p.name for p in (FOLDER / "saves").rglob("*.pt") if p.stat().st_size],
    }
    print(json.dumps(found), file=sys.__stderr__)


os.dup2(2, 1)  # deepspeed prints
sys.exit(sum(t.run(1, work, FOLDER)))

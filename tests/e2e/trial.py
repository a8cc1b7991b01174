"""A training to tune: ``trial.py RATE``. Its loss is its rate.

Above 5 it goes on until it is ended, at 0 it fails.
"""

import os
import sys
import time

import torch

import holdfast

STEPS, STEP_S = 4, 0.1
rate = float(sys.argv[1])
if not rate:
    raise ValueError("no rate")
state = {"weights": torch.ones(4)}
with holdfast.Checkpointer(
    os.environ["TORCHELASTIC_RUN_ID"], state, save=holdfast.EverySteps(1)
) as ck:
    restored = ck.restore()
    step = restored.step if restored else 0
    print("began at", step, flush=True)
    while step < STEPS or rate > 5:
        step += 1
        handle = ck.step(step, notes={"loss": rate})
        time.sleep(STEP_S)
    if step > (restored.step if restored else 0):
        handle.wait("local")

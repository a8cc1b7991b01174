"""What ``holdfast.testing`` is tried with: ``testing_train.py OUT``, on any ranks, 40 steps.

The first attempt of the job ``KILLED`` hardly goes on after the 31st: it waits for its end.
"""

import os
import sys
import time

import torch
from torch import nn

import holdfast

torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
job = os.environ["TORCHELASTIC_RUN_ID"]
with holdfast.Checkpointer(job, state, save=holdfast.EverySteps(1)) as ck:
    restored = ck.restore()
    first = restored.step if restored else 0
    print(f"after step {first}", flush=True)
    for step in range(first, int(os.environ.get("STEPS", "40"))):
        loss = model(torch.full((4, 8), float(step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ck.step(step + 1)
        if step >= 30 and job == os.environ.get("KILLED") and restored is None:
            time.sleep(20)  # a busy machine kills late, and has no slot for steps that come fast
        time.sleep(float(os.environ.get("PAUSE", "0.05")))
if torch.distributed.get_rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
print("done", flush=True)

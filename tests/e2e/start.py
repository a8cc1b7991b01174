"""A rank that begins where its arguments say; with an average that earlier launches may lack.

Prints ``restored <step> <missing names>``, ``step <n> -`` while it runs, ``final <sha256>``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
from torch import nn

import holdfast
from holdfast.errors import CheckpointError


def main() -> None:
    """Train, and say what was restored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--persist", type=int, default=0)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--back-to", type=int)
    parser.add_argument("--average", action="store_true")
    parser.add_argument("--loose", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    average = torch.optim.swa_utils.AveragedModel(model)
    if options.average:
        state["average"] = average
    persist = holdfast.EverySteps(options.persist) if options.persist else None
    with holdfast.Checkpointer(
        options.job, state, replicas=0, persist=persist, fresh=options.fresh
    ) as ck:
        try:
            restored = ck.restore(options.back_to, strict=not options.loose)
        except CheckpointError as error:
            print(f"refused {error.kind}: {error}", flush=True)
            raise SystemExit(3) from None
        begin, missing = (restored.step, restored.missing) if restored else (0, ())
        print(f"restored {begin} {' '.join(missing)}", flush=True)
        for step in range(begin + 1, options.steps + 1):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
            handle = ck.step(step)
            if handle is not None:
                due = options.persist and step % options.persist == 0
                handle.wait("durable" if due else "local", timeout_s=60)
            print(f"step {step} -", flush=True)
            if step == options.kill_at and not begin:
                os.kill(os.getpid(), signal.SIGKILL)
    digest = hashlib.sha256()
    for tensor in (*model.state_dict().values(), *average.module.state_dict().values()):
        digest.update(tensor.numpy().tobytes())
    print(f"final {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()

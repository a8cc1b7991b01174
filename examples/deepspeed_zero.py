"""DeepSpeed's ZeRO: the optimizer is cut over the ranks, and with stage 3 the weights are too.

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py --stage 2

Run it, kill it, run it again, with another stage or as many ranks or not. It runs on CPU as it is
and needs no service: ``save_checkpoint`` writes into the folder.
"""

from __future__ import annotations

import argparse
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn

import holdfast.integrations.deepspeed

warnings.simplefilter("ignore")  # deepspeed has many of its own
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402

BATCH = 48  # divides by 2, 3, 4 and 6 ranks: all of them see the same batch, whatever their number


def main() -> None:
    """Fit a line to noise, saving every tenth step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--folder", default="build/deepspeed_zero")
    arguments = parser.parse_args()
    holdfast.integrations.deepspeed.install()
    if not torch.cuda.is_available():  # else DeepSpeed compiles C++ for CPUs, for minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": BATCH // size,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": arguments.stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    path, _ = engine.load_checkpoint(arguments.folder)
    begin = engine.global_steps if path else 0
    print(f"rank {rank} begins at step {begin}", flush=True)
    for step in range(begin + 1, arguments.steps + 1):
        torch.manual_seed(step)
        inputs = torch.randn(BATCH, 64)[rank::size].to(engine.device)
        loss = (engine(inputs.bfloat16()) - inputs.sum(dim=1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        if step % 10 == 0:
            engine.save_checkpoint(arguments.folder, tag=f"step-{step}")
            if rank == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29501")
    main()

"""A rank of two that do not fit together, or that train two models in one process."""

from __future__ import annotations

import argparse
import logging
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import CheckpointError


def meshed() -> nn.Module:
    """Return a model of four rows, two on each rank."""
    model = nn.Linear(3, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def less() -> None:
    """Rank 1 does not save its optimizer."""
    model = meshed()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    state: dict[str, object] = {"model": model}
    if dist.get_rank() == 0:
        state["optimizer"] = optimizer
    told = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda _record: told.set()  # type: ignore[method-assign]
    logging.getLogger("holdfast.training.plan_doubts").addHandler(handler)
    ck = holdfast.Checkpointer("less", state, save=holdfast.EverySteps(1))
    ck.restore()
    for number in range(1, 100):
        handle = ck.step(number)
        assert handle is not None
        try:
            handle.wait("local", timeout_s=60)
        except CheckpointError as error:
            print(error, flush=True)
        enough = torch.tensor(int(told.is_set()))
        dist.broadcast(enough, 0)
        if enough:
            break
    try:
        ck.close()
    except CheckpointError as error:
        print(error, flush=True)


def step() -> None:
    """Rank 1 calls its second step the third."""
    state: dict[str, object] = {"model": nn.parallel.DistributedDataParallel(nn.Linear(2, 2))}
    with holdfast.Checkpointer("step", state, save=holdfast.EverySteps(1)) as ck:
        ck.restore()
        for number in (1, 2 + dist.get_rank(), 4):
            handle = ck.step(number)
            assert handle is not None
            if number in {2, 3}:
                apart = handle
            else:
                handle.wait("local", timeout_s=60)
            dist.barrier()
        try:
            apart.wait("local", timeout_s=60)
        except CheckpointError as error:
            print(error, flush=True)


def roles() -> None:
    """Save or restore an actor over a mesh and a critic of each rank, at steps of their own."""
    actor, critic = meshed(), nn.Linear(1, 1)
    pair = [
        holdfast.Checkpointer("roles", {"m": model}, save=holdfast.EverySteps(1), role=role)
        for role, model in (("actor", actor), ("critic", critic))
    ]
    for ck in pair:
        ck.restore()
    with torch.no_grad():
        print(f"holds {actor.weight.to_local()[0, 0]:.0f} {critic.weight[0, 0]:.0f}", flush=True)
        nn.init.constant_(actor.weight, 3.0)
        nn.init.constant_(critic.weight, 5.0)
    for at, ck in enumerate(pair):
        handle = ck.save(10 + at)
        handle.wait("local", timeout_s=60)
        ck.close()
    print(f"holds {actor.weight.to_local()[0, 0]:.0f} {critic.weight[0, 0]:.0f}", flush=True)


def main() -> None:
    """Do what ``--case`` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=["less", "step", "roles"], required=True)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"less": less, "step": step, "roles": roles}[parser.parse_args().case]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

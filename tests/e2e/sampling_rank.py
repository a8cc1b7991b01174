"""A rank that notes which samples its model sees: ``FOLDER [JOB]``; without a job it knows nothing.

Each sample is its number. What the model is given goes into ``FOLDER/LAUNCH.RANK``, a line for
each step, with the epoch before it, before the step can be saved.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIZE, EPOCHS, BATCH = 235, 2, 12
"""``BATCH`` is that of all ranks together."""


class Numbers(Dataset):
    """Numbers, with a draw beside each as an augmentation has it."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


def main() -> None:
    folder, job = Path(sys.argv[1]), "".join(sys.argv[2:])
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    seen = (folder / f"{os.environ['LAUNCH']}.{rank}").open("w", buffering=1)
    data = Numbers()
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(
        data, BATCH // ranks, sampler=sampler, num_workers=2, prefetch_factor=4,
        persistent_workers=True,
    )  # fmt: skip
    model = DistributedDataParallel(nn.Linear(2, 1))
    model.register_forward_pre_hook(
        lambda _, given: print(sampler.epoch, *given[0][:, 0].int().tolist(), file=seen)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def train(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()

    if job:
        with_holdfast(job, model, optimizer, loader, train)
    else:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for batch in loader:
                train(batch)
    dist.barrier()
    dist.destroy_process_group()


def with_holdfast(job: str, model: object, optimizer: object, loader: object, train: object):
    """Do the same with a Checkpointer; nothing of it says how many ranks there are."""
    import holdfast

    batches = holdfast.ResumableLoader(loader)
    at = {"epoch": 0, "step": 0}
    state = {"model": model, "optimizer": optimizer, "loader": batches, "at": at}
    with holdfast.Checkpointer(job, state) as ck:
        restored = ck.restore()
        print("goes on after step", restored.step if restored else 0, flush=True)
        for epoch in range(at["epoch"], EPOCHS):
            at["epoch"] = epoch
            loader.sampler.set_epoch(epoch)
            for batch in batches:
                train(batch)
                at["step"] += 1
                ck.step(at["step"]).wait("local")


if __name__ == "__main__":
    main()

"""An elastic script: ``FOLDER JOB EPOCHS KILL``. It says nothing of how many ranks there are.

Each sample is its number. What the model of a rank is given goes into ``FOLDER/LAUNCH.RANK``, a
line for each micro-batch with the number of the update it is part of. ``KILL``: the process kills
itself before the backward of the second micro-batch of that update.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import holdfast
from holdfast import elastic

SIZE, BATCH, LOCAL = 103, 12, 3


class Numbers(Dataset):
    """Numbers, with a draw beside each as an augmentation has it."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


def main() -> None:
    folder, job, epochs_count, kill = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    elastic.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    model = elastic.AdaptiveDataParallel(net, optimizer)
    loader = elastic.AdaptiveDataLoader(Numbers(), BATCH, shuffle=True, num_workers=1)
    loader.autoscale_batch_size(BATCH, (1, LOCAL), gradient_accumulation=True)
    epochs, stats = elastic.remaining_epochs_until(epochs_count), elastic.Accumulator()
    state = {
        "model": model, "optimizer": optimizer, "loader": loader, "epochs": epochs, "stats": stats,
    }  # fmt: skip
    seen = (folder / f"{os.environ['LAUNCH']}.{rank}").open("w", buffering=1)
    with holdfast.Checkpointer(job, state, save=holdfast.EverySteps(1)) as ck:
        ck.restore()
        print("goes on after step", model.updates, flush=True)
        for _epoch in epochs:
            for batch in loader:
                print(model.updates, *batch[:, 0].int().tolist(), file=seen)
                optimizer.zero_grad()
                loss = model(batch).mean()
                if rank == 0 and model.updates == kill and loader.is_update_end:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
                stats["seen"] += len(batch)
                if handle := ck.step(model.updates):
                    handle.wait("local")
            with stats.synchronized():
                print("seen", stats["seen"], flush=True)


if __name__ == "__main__":
    main()

"""A training on a GPU: ``FOLDER NAME [JOB]``. Without a job it knows nothing of Holdfast.

Mixed precision with its scaler, dropout that draws on the GPU, batch norm, images in channels-last
order, a schedule and a fused optimizer. Rank 1 kills itself once, in the middle; what each rank
ends with is in ``FOLDER/NAME.RANK``.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS, SIZE, BATCH = 3, 128, 8
DIES_AFTER, STEP_S = 11, 0.1


class Images(Dataset):
    """Noise that depends on its number."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=drawn), index % 10


class Training:
    """Model, optimizer, scaler, schedule and data, and a step of them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(self.rank)
        net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(), nn.Dropout(0.3),
            nn.Flatten(), nn.Linear(32 * 16 * 16, 10),
        )  # fmt: skip
        net = net.cuda().to(memory_format=torch.channels_last)
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 48)
        self.scaler = torch.amp.GradScaler("cuda", growth_interval=7)
        self.sampler = DistributedSampler(Images(), seed=3)
        self.loader = DataLoader(Images(), BATCH, sampler=self.sampler, pin_memory=True)
        self.steps_count = 0
        self._end, self._killed = folder / f"{name}.{self.rank}", folder / f"{name}.killed"

    def train(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        images = batch[0].cuda(non_blocking=True).to(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(self.model(images), batch[1].cuda())
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.steps_count += 1
        time.sleep(STEP_S)

    def perhaps_die(self) -> None:
        """Die once, without a word, where the run is to be disturbed."""
        due = self.steps_count == DIES_AFTER and self.rank == 1 and "calm" not in self._end.name
        if due and not self._killed.exists():
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        """Write what it has come to, and the next draw of the GPU."""
        kept = [v for state in self.optimizer.state.values() for v in state.values()]
        drawn = torch.rand(4, device="cuda")
        text = hashlib.sha256()
        for tensor in (*self.model.state_dict().values(), *kept, drawn):
            text.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
        scale, rate = self.scaler.get_scale(), self.schedule.get_last_lr()
        self._end.write_text(f"{text.hexdigest()} {scale} {rate} {drawn.tolist()}")


def main() -> None:
    folder, name, job = Path(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")  # ranks that share a GPU have no NCCL
    training = Training(folder, name)
    if job:
        with_holdfast(job, training)
    else:
        for epoch in range(EPOCHS):
            training.sampler.set_epoch(epoch)
            for batch in training.loader:
                training.train(batch)
                training.perhaps_die()
    training.leave()
    dist.barrier()
    dist.destroy_process_group()


def with_holdfast(job: str, training: Training) -> None:
    import holdfast

    batches = holdfast.ResumableLoader(training.loader)
    at = {"epoch": 0}
    state = {
        "model": training.model, "optimizer": training.optimizer, "scaler": training.scaler,
        "schedule": training.schedule, "loader": batches, "at": at,
    }  # fmt: skip
    with holdfast.Checkpointer(job, state) as ck:
        restored = ck.restore()
        training.steps_count = restored.step if restored else 0
        print("goes on after step", training.steps_count, flush=True)
        for epoch in range(at["epoch"], EPOCHS):
            at["epoch"] = epoch
            training.sampler.set_epoch(epoch)
            for batch in batches:
                training.train(batch)
                ck.step(training.steps_count).wait("local")
                training.perhaps_die()


if __name__ == "__main__":
    main()

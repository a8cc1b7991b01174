"""Real text that every machine with Python has: the standard library's own source, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

TEXT_BYTES_MAX = 4 << 20


def read_text() -> Tensor:
    """Return the first 4 MiB of the top-level modules' source, in file order; uint8."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text[:TEXT_BYTES_MAX]), dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, each with the same piece one byte on: what to read, what to predict."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = self.text[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


def make_loader(
    *, context: int, batch: int, rank: int, world_size: int, seed: int
) -> StatefulDataLoader[tuple[Tensor, Tensor]]:
    """Return a shuffled loader of this rank's part of the text; it knows its own position."""
    windows = Windows(read_text(), context)
    sampler = StatefulDistributedSampler(
        windows, num_replicas=world_size, rank=rank, shuffle=True, seed=seed, drop_last=True
    )
    return StatefulDataLoader(windows, batch_size=batch, sampler=sampler, drop_last=True)

"""Attempts of a job with a loader, on pretended ranks: each goes on from what another has saved."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from holdfast import ResumableLoader
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture
from holdfast.state.positions import LoaderClock

_SPEC = importlib.util.spec_from_file_location(
    "holdfast_test_worlds", Path(__file__).with_name("worlds.py")
)
worlds = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(worlds)

SIZE = 37
Make = Callable[[int, int, int], Any]


def train(
    folder: Path, make: Make, saved: Any, *, ranks: int, batch_size: int = 2, steps: int = 99
) -> tuple[list[tuple[int, float]], Any]:
    """Return the samples of at most ``steps`` steps in the order of ranks, and what was saved."""
    captures, taken = [], []
    for rank in range(ranks):
        torch.manual_seed(11)
        loader = make(rank, ranks, batch_size)
        capture = Capture({"loader": loader}, rank=rank, world_size=ranks)
        if saved is not None:
            with open_files(saved) as held:
                capture.load(held, step=1)
        iterator, batches = iter(loader), []
        while len(batches) < steps and (batch := next(iterator, None)) is not None:
            batches.append(list(zip(*(part.tolist() for part in batch), strict=True)))
        captures.append((capture, iterator))
        taken.append(batches)
    assert len(set(map(len, taken))) == 1, "a collective would wait for ever"
    seen = [
        batches[step][at]
        for step in range(len(taken[0]))
        for at in range(batch_size)
        for batches in taken
        if at < len(batches[step])
    ]
    folder.mkdir()
    saver = worlds.Saver(folder)
    files = [saver.save(capture) for capture, _ in captures]
    assert saver.engine.close(worlds.WAIT_S)
    for capture, _ in captures:
        capture.release()
    return seen, files


def of_world(loader: Any, world: tuple[int, int]) -> ResumableLoader:
    wrapped = ResumableLoader(loader)
    wrapped.bind(LoaderClock(world))
    return wrapped


def inside(loader: ResumableLoader) -> Any:
    """Return what is saved after one batch."""
    iterator = iter(loader)
    next(iterator)
    return loader.state_dict()


def shared(ranks: int, **more: Any) -> ResumableLoader:
    sampler = DistributedSampler(range(more.pop("size", SIZE)), ranks, 0, **more)
    return of_world(DataLoader(range(SIZE), sampler=sampler), (0, ranks))

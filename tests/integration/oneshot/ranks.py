"""What each rank of a world of gloo processes does; started by the tests, one process per rank.

``python ranks.py save|load FOLDER STORE RANK WORLD``: the state is trained from a fixed seed,
so that every rank knows what the others hold.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.errors import CheckpointError

STEPS = 3
SAVED_WORLD = 2
ASTRAL = "\N{FIRE}" * 300


class Net(nn.Module):
    """Layers of several sizes and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def trained(rank: int, steps: int = STEPS) -> dict[str, object]:
    """A DDP model and its optimizer, after some steps; and what belongs to this rank alone."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "model": model,
        "optimizer": optimizer,
        "extra": {"rank": rank, "own": torch.full((2,), float(rank))},
    }


def tensors(state: dict) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer by the name it is stored under."""
    model = getattr(state["model"], "module", state["model"])
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    held = state["optimizer"].state_dict()["state"]
    for number, name in enumerate(names):
        for key, tensor in held.get(number, {}).items():
            found[f"optimizer.state.model.{name}.{key}"] = tensor
    return found


def fail(folder: Path, rank: int, state: dict[str, object]) -> None:
    """Save over a checkpoint what rank 1 cannot; every rank writes down what it was told."""
    place = folder / "refused"
    holdfast.save(place, {"kept": torch.arange(4)})
    bad = [{**state, "extra": {name: main}} for name in ("bad", ASTRAL)]
    ema = DistributedDataParallel(Net())  # made on all ranks, and saved by one
    for number, cannot in enumerate([*bad, [1], {**state, "average": ema}]):
        try:
            holdfast.save(place, cannot if rank == 1 else state, overwrite=True)
        except CheckpointError as error:
            (folder / f"error-{number}-{rank}.json").write_text(
                json.dumps([error.kind, str(error)])
            )
    kept = {"kept": torch.zeros(4, dtype=torch.int64)}
    holdfast.load(place, kept)
    assert torch.equal(torch.arange(4), kept["kept"])


def main(action: str, folder: Path, store: str, rank: int, world_size: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    if action == "save":
        state = trained(rank)
        fail(folder, rank, state)
        holdfast.save(store, state, notes={"steps": STEPS})
        if rank == 0:
            torch.save(tensors(state), folder / "expected.pt")
    else:
        state = trained(rank, steps=0)
        holdfast.load(store, state)
        expected = torch.load(folder / "expected.pt")
        found = tensors(state)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), name
        # Of a rank of its own: the one of the same number, modulo the saved world.
        saved_rank = rank % SAVED_WORLD
        assert state["extra"]["rank"] == saved_rank
        assert torch.equal(state["extra"]["own"], torch.full((2,), float(saved_rank)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))

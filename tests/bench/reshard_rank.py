"""A rank of the reshard benchmark: ``save FOLDER RUNS BYTES`` or ``load FOLDER TURN BYTES``.

Rank 0 prints ``took OURS PEER``, seconds from one barrier to the next, so that the slowest rank
counts. Model and optimizer are there before, and so is what the peer works on: state dicts. What
this script calls of either is imported at its top; what that imports later, counts.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast import Checkpointer, Never
from holdfast.errors import PreconditionError

JOB = "reshard"
BLOCKS_COUNT = 32
MOMENTS = 2
WAIT_S = 120.0
WARM_UP_MAX = 8


class Block(nn.Module):
    """Four parameters of one block, as FSDP2 shards it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(torch.empty(rows, 1024)) for _ in range(4))

    def forward(self) -> torch.Tensor:
        """Return something of all parameters."""
        return torch.stack([one.sum() for one in self.held]).sum()


def build(length_bytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and AdamW with its moments, sharded over all ranks; all zeros but the steps."""
    torch.set_num_threads(1)
    rows = length_bytes // (1 + MOMENTS) // BLOCKS_COUNT // 4 // 1024 // 4
    with torch.device("meta"):
        model = nn.Sequential(*(Block(rows) for _ in range(BLOCKS_COUNT)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return all tensors by name, as the peer gets them: those in place, nothing gathered."""
    moments = {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return {"model": dict(model.named_parameters()), "optimizer": moments}


def fill(state: dict[str, dict[str, Any]], number: int | None) -> None:
    """Give each tensor a value of its own; None: zero all of them."""
    for table in state.values():
        for at, (name, tensor) in enumerate(table.items()):
            if not name.endswith(".step"):
                local(tensor).fill_(0.0 if number is None else number + at)


def check(state: dict[str, dict[str, Any]], number: int) -> None:
    """Fail unless each tensor has the value that ``fill`` gave it."""
    for table in state.values():
        for at, (name, tensor) in enumerate(table.items()):
            if not name.endswith(".step"):
                assert bool((local(tensor) == number + at).all()), name


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of the tensor lies here."""
    found = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until the last rank has done it."""
    dist.barrier()
    began_s = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began_s


def save(folder: Path, runs: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save in turn; what is before the first full save of each does not count.

    On a busy machine the first of ours is given up, while its slots get their memory.
    """
    state = tensors(model, optimizer)
    planner = DefaultSavePlanner(enable_plan_caching=True, dedup_save_to_lowest_rank=True)
    of_ours = {"model": model, "optimizer": optimizer}
    ck = Checkpointer(JOB, of_ours, save=Never(), replicas=0, rng=False)

    def ours() -> None:
        ck.save(number).wait("local", timeout_s=WAIT_S)

    def peer() -> None:
        writer = FileSystemWriter(folder / "dcp", thread_count=1, sync_files=False)
        dcp_save(state, storage_writer=writer, planner=planner)

    ck.restore()
    number = 0
    while number < WARM_UP_MAX:
        number += 1
        try:
            ours()
        except PreconditionError as error:
            print(f"step {number} is warming up: {error}", flush=True)
        else:
            break
    peer()
    for _ in range(runs):
        number += 1
        fill(state, number)
        say(timed(ours), timed(peer))
    (folder / "number").write_text(str(number))
    ck.close()


def load(folder: Path, turn: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load by both, which goes first is a matter of ``turn``; check what each has loaded."""
    state = tensors(model, optimizer)
    number = int((folder / "number").read_text())
    took_s = {}

    def ours() -> None:
        of_ours = {"model": model, "optimizer": optimizer}
        checkpointers.append(Checkpointer(JOB, of_ours, save=Never(), replicas=0, rng=False))
        restored = checkpointers[0].restore()
        assert restored is not None
        assert restored.step == number

    def peer() -> None:
        dcp_load(state, storage_reader=FileSystemReader(folder / "dcp"))

    checkpointers: list[Checkpointer] = []
    for work in (ours, peer) if turn % 2 else (peer, ours):
        fill(state, None)
        took_s[work] = timed(work)
        check(tensors(model, optimizer), number)
    say(took_s[ours], took_s[peer])
    for checkpointer in checkpointers:
        checkpointer.close()


def say(ours_s: float, peer_s: float) -> None:
    """Print both, on rank 0."""
    if dist.get_rank() == 0:
        print(f"took {ours_s:.6f} {peer_s:.6f}", flush=True)


def main() -> None:
    """Do what the words say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("save", "load"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("length_bytes", type=int)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    gc.unfreeze()  # what forked this process froze its objects, which a script's start does not
    dist.init_process_group("gloo")
    work = {"save": save, "load": load}[options.what]
    work(options.folder, options.number, *build(options.length_bytes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

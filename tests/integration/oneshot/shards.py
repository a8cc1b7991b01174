"""What each of four gloo processes does with a module whose parameters are ``ShardedTensor``s.

``python shards.py FOLDER RANK``: torch cuts a parameter of each module, an optimizer steps what is
here of it, and the module is saved by path and loaded into one that is cut along the other dim.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast

WORLD = 4


def build(dim: int, seed: int) -> dict[str, object]:
    """Return a module with a table in four shards along ``dim``, and what steps it."""
    from torch.distributed._shard import shard_parameter  # it warns when imported
    from torch.distributed._shard.sharded_optim import ShardedOptimizer
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    torch.manual_seed(seed)
    module = nn.Module()
    module.table = nn.Parameter(torch.randn(6, 10))
    spec = ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in range(WORLD)])
    shard_parameter(module, "table", spec)
    module.table.local_shards()[0].tensor.requires_grad_(True)
    optimizer = ShardedOptimizer(dict(module.named_parameters()), torch.optim.AdamW, lr=0.1)
    return {"model": module, "optimizer": optimizer}


def train(state: dict, steps: int) -> None:
    """Give every element a gradient that tells its place in the whole, and step."""
    [shard] = state["model"].table.local_shards()
    rows, columns = (
        slice(begin, begin + length)
        for begin, length in zip(
            shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True
        )
    )
    for step in range(steps):
        torch.manual_seed(step)
        shard.tensor.grad = torch.randn(6, 10)[rows, columns].clone()
        state["optimizer"].step()


def tensors(state: dict) -> dict[str, torch.Tensor]:
    """Return the table and its moments, whole, put together of all ranks; collective."""
    [shard] = state["model"].table.local_shards()
    kept = state["optimizer"].state[shard.tensor]
    dim = 0 if shard.metadata.shard_sizes[1] == 10 else 1
    held = {"": shard.tensor.detach(), **{k: v for k, v in kept.items() if v.dim()}}
    ranks: list[dict] = [{}] * WORLD
    dist.all_gather_object(ranks, held)
    return {key: torch.cat([some[key] for some in ranks if key in some], dim) for key in held}


def check(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys() == {"", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def main(folder: Path, rank: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    state = build(0, seed=0)
    train(state, 2)
    holdfast.save(folder / "saved", state)
    again = build(1, seed=1)
    holdfast.load(folder / "saved", again)
    check(tensors(state), tensors(again))
    train(state, 1)
    train(again, 1)
    check(tensors(state), tensors(again))
    if rank == 0:
        torch.save(tensors(state), folder / "expected.pt")
    else:
        tensors(state)
    holdfast.save(folder / "again", again)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

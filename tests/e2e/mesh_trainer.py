"""A rank of a model that several ranks hold together: FSDP of both kinds, tensor parallel, ZeRO …

Prints ``loaded <step> <sha256>`` after the restore, ``step <n> <level> <sha256>`` after each step
and ``final <sha256>``: over model and optimizer, put together from all ranks, so that the same
state has the same digest on every mesh; ``part model <sha256>`` and ``part optimizer <sha256>`` are
of these alone. ``--kill-at`` makes it SIGKILL itself.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast

FSDP1 = {
    "fsdp1": ShardingStrategy.FULL_SHARD,
    "fsdp1-grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "fsdp1-hybrid": ShardingStrategy.HYBRID_SHARD,
}
SPLIT = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer; no dim divides evenly by four."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 5), nn.LayerNorm(5), nn.Linear(5, 3)
    )
    ranks = dist.get_world_size()
    if kind == "fsdp":
        shard(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))
    elif kind == "hsdp":
        shard(model, init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copy", "dp")))
    elif kind == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01, foreach=False)
    elif kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns when imported

        wrapped = DistributedDataParallel(model)
        dealt = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.AdamW, lr=0.01, foreach=False
        )
        return wrapped, dealt
    elif kind in FSDP1:
        wrapped = wrap(model, FSDP1[kind])
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01, foreach=False)
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, SPLIT)
    else:
        names, sizes = ("dp", "tp"), (2, ranks // 2)
        if kind == "3d":
            names, sizes = ("copy", "dp", "tp"), (2, 2, ranks // 4)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        parallelize_module(model, mesh["tp"], SPLIT)
        shard(model, mesh[names[:-1]])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def shard(model: nn.Sequential, mesh: object) -> None:
    """Have every layer with parameters sharded by itself, as people do."""
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def wrap(model: nn.Sequential, strategy: ShardingStrategy) -> nn.Module:
    """Return the model with FSDP1 around its first layer, and around the rest of it."""
    half = (2, dist.get_world_size() // 2)
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        mesh = init_device_mesh("cpu", half, mesh_dim_names=("copy", "dp"))
    fsdp = partial(
        FullyShardedDataParallel,
        sharding_strategy=strategy,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    model[0] = fsdp(model[0])
    return fsdp(model)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, part: str = "") -> str:
    """Return the digest of all tensors, or of a part of the state, whole; collective."""
    found = hashlib.sha256()
    flat, states_of = pieces_of_flat(model), states(model, optimizer)
    for name, parameter in model.named_parameters():
        kept = {"": parameter.detach(), **states_of.get(name, {})}
        if name in flat:
            kept = put_together(flat[name], kept)
        for key in sorted(kept):
            if part == ("optimizer" if key == "" else "model"):
                continue
            tensor = kept[key]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            bare = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
            found.update(f"{bare}.{key}".encode() + whole.contiguous().numpy().tobytes())
    return found.hexdigest()


def states(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, torch.Tensor]]:
    """Return what is kept of each parameter, by its name, whichever rank has it; collective."""
    steps = getattr(optimizer, "optim", optimizer)
    kept = {name: steps.state[p] for name, p in model.named_parameters() if p in steps.state}
    if steps is not optimizer:
        ranks: list[dict[str, dict[str, torch.Tensor]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, kept)
        kept = {name: of for some in ranks for name, of in some.items()}
        assert sum(map(len, ranks)) == len(kept)
    return kept


def pieces_of_flat(model: nn.Module) -> dict[str, int]:
    """Return where in each of FSDP1's flat parameters this rank's piece of it begins."""
    found: dict[int, int] = {}
    for module in model.modules():
        handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None and handle.uses_sharded_strategy:
            infos = handle.flat_param._shard_param_infos
            for parameter, info in zip(handle.flat_param._params, infos, strict=True):
                found[id(parameter)] = info.intra_param_start_idx or 0
    return {name: found[id(p)] for name, p in model.named_parameters() if id(p) in found}


def put_together(begin: int, kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a parameter and its state from the pieces of all ranks; collective."""
    ranks: list[tuple[int, dict[str, torch.Tensor]]] = [(0, {})] * dist.get_world_size()
    dist.all_gather_object(ranks, (begin, kept))
    whole: dict[str, torch.Tensor] = {}
    for key in {key for _, held in ranks for key in held}:
        held = {at: h[key] for at, h in ranks if key in h and h[""].numel()}
        steps = not held[min(held)].dim()
        whole[key] = held[min(held)] if steps else torch.cat([held[at] for at in sorted(held)])
    return whole


def main() -> None:
    """Train; look at the model without gradients now and then, which leaves FSDP unsharded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--meta", action="store_true", help="the restore gives it memory")
    parser.add_argument("--only", nargs="*", help="what of the state is restored")
    parser.add_argument("--lenient", action="store_true", help="the restore is not strict")
    parser.add_argument("--calm", action="store_true", help="nothing is saved")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--kill-ranks", type=int, nargs="*", default=[0])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with torch.device("meta" if options.meta else "cpu"):
        model, optimizer = build(options.mesh)
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    save = holdfast.Never() if options.calm else holdfast.EverySteps(1)
    checkpointer = holdfast.Checkpointer(options.job, state, save=save)
    if options.lenient:
        state["more"] = nn.Linear(2, 2)
    restored = checkpointer.restore(strict=not options.lenient, only=options.only)
    begin = restored.step if restored else 0
    print(f"restored {begin} {dict(restored.sources) if restored else {}}", flush=True)
    print(f"loaded {begin} {digest(model, optimizer)}", flush=True)
    for part in ("model", "optimizer"):
        print(f"part {part} {digest(model, optimizer, part)}", flush=True)
    for step in range(begin + 1, options.steps + 1):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 7)).square().mean()
        if step == options.kill_at and dist.get_rank() in options.kill_ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.zeros(1, 7))
        handle = checkpointer.step(step)
        assert (handle is None) == options.calm
        if handle is not None:
            handle.wait("replicated", timeout_s=60)
        level = handle.level if handle else "unsaved"
        print(f"step {step} {level} {digest(model, optimizer)}", flush=True)
    for part in ("model", "optimizer"):
        print(f"part {part} {digest(model, optimizer, part)}", flush=True)
    print(f"final {digest(model, optimizer)}", flush=True)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

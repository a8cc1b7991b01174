"""A rank of a pipeline without its schedule: the layers of a stage learn, each by itself.

Prints ``loaded <step> <sha256>`` after the restore and ``final <sha256>`` at the end: over model
and optimizer of all stages, so that the same state has the same digest on any number of them.
"""

from __future__ import annotations

import argparse
import hashlib
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast

LAYERS, WIDTH = 4, 7


class Layer(nn.Module):
    """A linear layer that counts its calls, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return as many numbers as came."""
        self.calls += 1
        hidden: torch.Tensor = self.linear(inputs)
        return hidden


class Stage(nn.Module):
    """Some of the layers, counted from 0."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the layers make of ``inputs``."""
        return torch.stack([layer(inputs).square().mean() for layer in self.layers]).sum()


def build(kind: str, stages: int) -> tuple[nn.Module, holdfast.Section]:
    """Return this rank's stage and what is saved of it."""
    rank, copies = dist.get_rank(), dist.get_world_size() // stages
    number, each = rank // copies, LAYERS // stages
    torch.manual_seed(number)
    module: nn.Module = Stage(each)
    ranks = [list(range(n * copies, (n + 1) * copies)) for n in range(stages)]
    groups = [dist.new_group(some) for some in ranks]
    if kind == "ddp":
        module = DistributedDataParallel(module, process_group=groups[number])
    elif kind == "fsdp":
        mesh = DeviceMesh.from_group(groups[number], "cpu", ranks[number], mesh_dim_names=("dp",))
        for layer in module.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    elif kind == "grid":
        sizes = stages, copies // 2, 2
        grid = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
        for layer in module.layers:
            split = {"linear": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(layer, grid["tp"], split)
            fully_shard(layer, mesh=grid["dp"])
        fully_shard(module, mesh=grid["dp"])
    names = {f"layers.{i}": f"layers.{number * each + i}" for i in range(each)}
    return module, holdfast.Section(module, names)


def digest(section: holdfast.Section, optimizer: torch.optim.Optimizer) -> str:
    """Return the digest of all tensors of all stages, whole; collective."""
    found: dict[str, str] = {}
    for name, tensor in [*section.module.named_parameters(), *section.module.named_buffers()]:
        for one in (tensor.detach(), *optimizer.state.get(tensor, {}).values()):
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            text = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()
            known = section.name(name.removeprefix("module."))
            found[known] = found.get(known, "") + text
    everybody: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    merged = sorted({item for some in everybody for item in some.items()})
    assert len(merged) == len(dict(merged)), "ranks differ about a tensor"
    return hashlib.sha256(repr(merged).encode()).hexdigest()


def main() -> None:
    """Train some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, section = build(options.kind, options.stages)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    state: dict[str, object] = {"model": section, "optimizer": optimizer}
    checkpointer = holdfast.Checkpointer(options.job, state, save=holdfast.EverySteps(1))
    restored = checkpointer.restore()
    begin = restored.step if restored else 0
    print(f"loaded {begin} {digest(section, optimizer)}", flush=True)
    for step in range(begin + 1, options.steps + 1):
        torch.manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(4, WIDTH)).backward()
        optimizer.step()
        handle = checkpointer.step(step)
        assert handle is not None
        handle.wait("replicated", timeout_s=60)
    print(f"final {digest(section, optimizer)}", flush=True)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Restores in processes of their own, which fail if they take more memory than is promised.

``python peaks.py save|load FOLDER RANK WORLD`` runs the cases for so many ranks. Those of ``SAVES``
make a checkpoint in ``FOLDER`` each. Those of ``LOADS`` compare resident memory at its highest with
what it was, less what the state has grown by, less what is mapped of segments in memory: that is
another's.
"""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.bucket.folder import CheckpointFolder
from holdfast.convert.exporting import export
from holdfast.convert.reading import CheckpointReader
from holdfast.integrations import torch_io
from holdfast.integrations.dcp import HoldfastReader
from holdfast.objectstore import open_store
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture

SHAPE = (2048, 2048)
TENSOR_BYTES = 4 * math.prod(SHAPE)
TENSORS_COUNT = 8
PARAMETERS_COUNT = 4
WINDOW_BYTES = 128 << 20
"""Parts that are held while a checkpoint in a store is read."""
SLACK_BYTES = 24 << 20
"""Code that is loaded, stacks, what an allocator keeps; whoever holds two tensors takes more."""
MOMENTS = ("exp_avg", "exp_avg_sq")
M_MMAP_THRESHOLD = -3

State = dict[str, Any]


def values(number: float, dim: int | None = None) -> torch.Tensor:
    """Return the tensor of this number; cut over all ranks along ``dim``."""
    tensor = torch.arange(math.prod(SHAPE), dtype=torch.float32).view(SHAPE).add_(number)
    if dim is None:
        return tensor
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    piece = tensor.chunk(mesh.size(), dim)[mesh.get_rank()].clone()
    return DTensor.from_local(piece, mesh, [Shard(dim)], shape=SHAPE, stride=tensor.stride())


def here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(dim: int | None = None) -> State:
    """Return a model, three times as much with what AdamW keeps of it."""
    model = nn.ParameterList(values(number, dim) for number in range(PARAMETERS_COUNT))
    optimizer = torch.optim.AdamW(model.parameters())
    for number, p in enumerate(model):
        moments = {key: values(number + 0.5, dim) for key in MOMENTS}
        optimizer.state[p] = {"step": torch.tensor(1.0), **moments}
    return {"model": model, "optimizer": optimizer}


def stepped(dim: int | None = None) -> State:
    """Return the same with other values."""
    state = trained(dim)
    kept = (tensor for of in state["optimizer"].state.values() for tensor in of.values())
    for tensor in (*state["model"].parameters(), *kept):
        here(tensor.detach()).fill_(-1.0)
    return state


def fresh(dim: int | None = None) -> State:
    """Return the same with other values, and nothing that the optimizer keeps."""
    state = stepped(dim)
    state["optimizer"].state.clear()
    return state


def check(state: State, dim: int | None = None) -> None:
    """Compare every tensor with what was saved."""
    for number, p in enumerate(state["model"].parameters()):
        found = {"": p.detach(), **state["optimizer"].state[p]}
        for key in ("", *MOMENTS):
            expected = values(number + 0.5 * bool(key), dim)
            assert torch.equal(here(expected), here(found[key])), (number, key)


def table(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {str(number): values(number).to(dtype) for number in range(TENSORS_COUNT)}


def check_table(found: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    for number in range(TENSORS_COUNT):
        assert torch.equal(values(number).to(dtype), found[str(number)]), number


def other_table(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: tensor.fill_(-1.0) for name, tensor in table(dtype).items()}


def lbfgs() -> State:
    """Return an optimizer with a history, which is the most of its state, and one parameter."""
    model = nn.ParameterList([torch.zeros(SHAPE)])
    optimizer = torch.optim.LBFGS(model.parameters())
    history = [values(number).view(-1) for number in range(TENSORS_COUNT)]
    last = {key: values(0).view(-1) for key in ("d", "prev_flat_grad")}
    optimizer.state[model[0]] = {"n_iter": 3, "old_dirs": history, **last}
    return {"model": model, "optimizer": optimizer}


def held_bytes(value: object) -> int:
    """Return the bytes of all tensors in a state; of those without memory none."""
    if isinstance(value, torch.Tensor):
        return 0 if value.is_meta else here(value).nbytes
    if isinstance(value, nn.Module):
        return sum(map(held_bytes, value.parameters()))
    if isinstance(value, torch.optim.Optimizer):
        return held_bytes(list(value.state.values()))
    items = value.values() if isinstance(value, dict) else value
    return sum(map(held_bytes, items)) if isinstance(value, dict | list) else 0


def status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) << 10


@contextmanager
def at_most(limit_bytes: int, state: object = None) -> Iterator[None]:
    """Fail if the block takes more at its highest than ``state`` has grown by and this."""
    gc.collect()  # what the case before has mapped
    before, mapped = status("VmRSS") - held_bytes(state), status("RssShmem")
    Path("/proc/self/clear_refs").write_text("5")  # what was highest until now is forgotten
    yield
    grown = status("RssShmem") - mapped + held_bytes(state)
    beside = status("VmHWM") - before - grown
    assert beside <= limit_bytes, f"{beside >> 20} MiB beside the state"
    print(f"{beside >> 20} MiB of {limit_bytes >> 20}", flush=True)


def in_memory(path: Path, state: State) -> None:
    """Load as a rank does that has all it needs in the memory of its node."""
    with closing(open_store(str(path))) as store:
        folder = CheckpointFolder(store)
        files = [(path / folder.segment_key(s), s) for s in folder.manifest().shards]
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with open_files(files) as segments, at_most(SLACK_BYTES, state):
        Capture(state, rank=rank, world_size=size).load(segments, step=0)


def in_store(path: Path, state: State) -> None:
    with at_most(WINDOW_BYTES + TENSOR_BYTES + SLACK_BYTES, state):
        holdfast.load(path, state)


Load = Callable[[Path, State], None]


def into_cut(folder: Path, load: Load, name: str, dim: int) -> None:
    state = fresh(dim)
    load(folder / name, state)
    check(state, dim)


def into_plain(folder: Path, load: Load, name: str, state: State) -> None:
    load(folder / name, state)
    check(state)


def into_meta(folder: Path, load: Load) -> None:
    blank = [nn.Parameter(torch.empty(SHAPE, device="meta")) for _ in range(PARAMETERS_COUNT)]
    model = nn.ParameterList(blank)
    into_plain(
        folder, load, "rows", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    )


def into_values(folder: Path, load: Load) -> None:
    state = {"table": other_table()}
    load(folder / "values", state)
    check_table(state["table"])


def into_lbfgs(folder: Path, load: Load) -> None:
    state = lbfgs()
    state["optimizer"].state.clear()
    load(folder / "lbfgs", state)
    [kept] = state["optimizer"].state.values()
    for number, tensor in enumerate(kept["old_dirs"]):
        assert torch.equal(values(number).view(-1), tensor), number


def into_ddp(folder: Path, load: Load) -> None:
    """What each rank has saved as its own is compared."""
    model = DistributedDataParallel(nn.ParameterList(fresh()["model"]), broadcast_buffers=False)
    load(folder / "own", {"model": model})
    for number, p in enumerate(model.module):
        assert torch.equal(values(number), p.detach()), number


def into_dcp(folder: Path, dtype: torch.dtype) -> None:
    state = {"table": other_table(dtype)}
    with at_most(WINDOW_BYTES + TENSOR_BYTES + SLACK_BYTES, state):
        dcp.load(state, checkpoint_id=folder / "values", storage_reader=HoldfastReader())
    check_table(state["table"], dtype)


def into_torch(folder: Path) -> None:
    found: list[object] = []
    with at_most(WINDOW_BYTES + TENSOR_BYTES + SLACK_BYTES, found):
        found.append(torch_io.load(folder / "torch"))
    check_table(found[0])


def exported(folder: Path, form: str) -> None:
    """Into a file that is in memory too, which is nobody's resident memory.

    Whoever writes a tensor still has it when the next one is put together.
    """
    limit_bytes = WINDOW_BYTES + 2 * TENSOR_BYTES + SLACK_BYTES
    with at_most(limit_bytes), closing(open_store(str(folder / "values"))) as store:
        read = CheckpointReader(CheckpointFolder(store))
        export(read, folder / form, form)
        read.close()


SAVES: dict[str, tuple[int, Callable[[Path], None]]] = {
    "rows": (4, lambda at: holdfast.save(at / "rows", trained(0))),
    "plain": (1, lambda at: holdfast.save(at / "plain", trained())),
    "values": (1, lambda at: holdfast.save(at / "values", {"table": table()})),
    "torch": (1, lambda at: torch_io.save(table(), at / "torch")),
    "lbfgs": (1, lambda at: holdfast.save(at / "lbfgs", lbfgs())),
    "own": (2, lambda at: holdfast.save(at / "own", {"model": trained()["model"]})),
}
_ANYWHERE: dict[str, tuple[int, Callable[[Path, Load], None]]] = {
    "half of the rows of four": (2, lambda at, load: into_cut(at, load, "rows", 0)),
    "columns of rows": (2, lambda at, load: into_cut(at, load, "rows", 1)),
    "columns of whole tensors": (2, lambda at, load: into_cut(at, load, "plain", 1)),
    "an optimizer that has stepped": (1, lambda at, load: into_plain(at, load, "rows", stepped())),
    "an optimizer before its model": (
        1, lambda at, load: into_plain(at, load, "plain", dict(reversed(fresh().items()))),
    ),
    "a model on the meta device": (1, into_meta),
    "plain tensors": (1, into_values),
    "an optimizer with a history": (1, into_lbfgs),
    "what ranks had each": (2, into_ddp),
}  # fmt: skip
LOADS: dict[str, tuple[int, Callable[[Path], None]]] = {
    f"{name} in {tier.__name__}": (size, lambda at, run=run, tier=tier: run(at, tier))
    for name, (size, run) in _ANYWHERE.items()
    for tier in (in_memory, in_store)
} | {
    "dcp": (1, lambda at: into_dcp(at, torch.float32)),
    "dcp with another dtype": (1, lambda at: into_dcp(at, torch.float16)),
    "torch_io": (1, into_torch),
    "export as safetensors": (1, lambda at: exported(at, "safetensors")),
    "export as hf": (1, lambda at: exported(at, "hf")),
    "export as dcp": (1, lambda at: exported(at, "dcp")),
}


def main(table: str, folder: Path, rank: int, size: int) -> None:
    warnings.simplefilter("ignore")
    # What is freed is given back at once, and not kept for what comes next.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    if size > 1:
        meeting = f"file://{folder}/{table}-{size}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    for case, (ranks_count, run) in {"save": SAVES, "load": LOADS}[table].items():
        if ranks_count == size:
            print(f"{case}:", end=" ", flush=True)
            run(folder)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

"""One of four ranks: what is measured, averaged, saved and gone on with when there are several.

Worlds of one to four ranks come one after the other in the same processes. Prints one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from holdfast import elastic
from holdfast.core.shard import Shard
from holdfast.elastic import running
from holdfast.elastic.noise_scale import NoiseScale, Norms
from holdfast.elastic.updates import Batching
from holdfast.errors import InvalidRequestError
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture


def _loaded(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
trainings = _loaded(HERE / "trainings.py")
worlds = _loaded(HERE.parents[1] / "unit" / "state" / "worlds.py")

FEATURES, SAMPLES = 6, 66
FOLDER, RANK = Path(sys.argv[1]), int(sys.argv[2])


@contextmanager
def world(size: int) -> Iterator[bool]:
    """Be one of so many ranks inside; False: not one of them. At the end all wait for all."""
    if RANK < size:
        meeting = FOLDER / f"meeting-{next(_NUMBERS)}"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=RANK, world_size=size)
        yield True
        dist.barrier()
        dist.destroy_process_group()
    else:
        next(_NUMBERS)
        yield False
    _meet()


_NUMBERS = iter(range(10_000))


def _meet() -> None:
    """Wait until all four are here."""
    meeting = FOLDER / f"all-{next(_NUMBERS)}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=RANK, world_size=4)
    dist.barrier()
    dist.destroy_process_group()


def data(count: int = SAMPLES) -> TensorDataset:
    """Return the first of some samples, of which the first number is theirs alone."""
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    inputs[:, 0] = torch.arange(SAMPLES) / SAMPLES
    inputs = inputs[:count]
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def net(seed: int = 2) -> nn.Sequential:
    """Return a small model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over a batch."""
    return (model(inputs) - targets).square().mean()


def gradient(module: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the gradient of a plain model as one vector."""
    grads = torch.autograd.grad(loss_of(module, *batch), list(module.parameters()))
    return torch.cat([g.reshape(-1) for g in grads]).double()


def of_all(vector: torch.Tensor) -> list[torch.Tensor]:
    """Return everybody's."""
    held = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(held, vector)
    return held


def divided(loader: elastic.AdaptiveDataLoader, micro_batches: int) -> None:
    """Have the loader's batch come in so many micro-batches, for good."""
    size, replicas = loader.batch_size, dist.get_world_size()
    loader._batching = Batching(size=size, replicas=replicas, micro_batches=micro_batches)
    loader._choose = lambda: None


class Reference:
    """The model that plain training on whole batches makes, and what its gradients tell."""

    def __init__(self, size: int) -> None:
        self.net = net()
        self.noise = NoiseScale(1)
        self._size = size

    def update(self, at: range) -> None:
        """Do one step, with the samples of all ranks."""
        batch = [part[at.start : at.stop] for part in data().tensors]
        whole = gradient(self.net, batch)
        if len(at) == self._size:
            self._measure(at, whole)
        end = 0
        with torch.no_grad():
            for parameter in self.net.parameters():
                part = whole[end : end + parameter.numel()].reshape(parameter.shape)
                parameter.sub_(0.05 * part.float())
                end += parameter.numel()

    def _measure(self, at: range, whole: torch.Tensor) -> None:
        replicas = dist.get_world_size()
        shares = [len(part) for part in torch.arange(len(at)).tensor_split(replicas)]
        begin, local = at.start, 0.0
        for share in shares:
            mine = [part[begin : begin + share] for part in data().tensors]
            local += float(gradient(self.net, mine).square().sum()) / replicas
            begin += share
        count = len(at) * sum(1 / share for share in shares) / replicas
        total = float(whole.square().sum())
        self.noise.update(Norms(local=(local,), total=(total,), count=count, scale=1.0))


def whole_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters, put together from shards."""
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()
    ]


def close(ours: nn.Module, theirs: nn.Module) -> float:
    """Return by how much the parameters of two models differ at most."""
    pairs = zip(whole_parameters(ours), theirs.parameters(), strict=True)
    return max(float((a - b.detach()).abs().max()) for a, b in pairs)


def measured(kind: str, size: int, micro_batches: int) -> dict[str, object]:
    """Train one pass and compare updates and noise with those of whole batches."""
    module, reference = net(), Reference(size)
    model: Any = module
    if kind == "ddp":
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        model = elastic.AdaptiveDataParallel(module, optimizer)
        adaptation = model.adaptation
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        mesh = mesh if kind == "hsdp" else init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(module[0], mesh=mesh)
        fully_shard(module, mesh=mesh)
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        adaptation = elastic.adapt(module, optimizer)
    # FSDP2 takes unequal micro-batches for equal ones: there are none in 64 samples.
    loader = elastic.AdaptiveDataLoader(data(SAMPLES if kind == "ddp" else 64), size)
    divided(loader, micro_batches)
    for inputs, targets in loader:
        now = running.current()
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        if now.micro.last:
            reference.update(now.micro.of)
    adaptation.settle()
    noise, expected = adaptation.noise, reference.noise
    return {
        "differs": close(model, reference.net),
        "sqr": noise.sqr / expected.sqr - 1,
        "var": noise.var / expected.var - 1,
        "biased": noise.biased,
        "updates": adaptation.updates,
        "state": json.dumps(adaptation.noise.state_dict()),
    }


def summed() -> dict[str, object]:
    """Add on each rank, under names that others do not have, and read."""
    stats = elastic.Accumulator()
    for _ in range(2):
        stats["all"] += RANK + 0.5
        stats[f"of {RANK}"] += torch.tensor(float(RANK))
    with stats.synchronized():
        return dict(stats)


def agreed_on() -> list[int]:
    """Choose a batch where each rank has measured something else."""
    loader = elastic.AdaptiveDataLoader(data(), 16)
    loader.autoscale_batch_size(64, (1, 16), gradient_accumulation=True)
    for local in (4, 16):
        for _ in range(3):
            step_s = 1.0 + 0.1 * (RANK + 1) * local
            loader._profiles.add((1, 4, local), step_s, synced=True, sync_s=0.9)
    loader._noise = (1.0, 100.0 * (RANK + 1), False)
    next(iter(loader))
    return [loader.current_batch_size, loader.accumulation_steps]


class Job:
    """What a script holds, and which samples its model saw."""

    def __init__(self, batch: int = 12, micro_batches: int = 1, *, sharded: bool = False) -> None:
        module = net()
        self.adaptation: Any
        if sharded:
            fully_shard(module)
            self.model: Any = module
            optimizer = torch.optim.AdamW(module.parameters(), 0.01)
            self.adaptation = elastic.adapt(module, optimizer)
        else:
            optimizer = torch.optim.AdamW(module.parameters(), 0.01)
            self.model = elastic.AdaptiveDataParallel(module, optimizer, bucket_cap_mb=0.0001)
            self.adaptation = self.model.adaptation
        self.optimizer = optimizer
        self.loader = elastic.AdaptiveDataLoader(data(), batch, shuffle=True, epoch="pass")
        if micro_batches > 1:
            divided(self.loader, micro_batches)
        self.stats = elastic.Accumulator()
        self.state = {
            "model": self.model, "optimizer": optimizer, "loader": self.loader,
            "stats": self.stats, **({"adaptation": self.adaptation} if sharded else {}),
        }  # fmt: skip
        self.capture = Capture(self.state, rank=RANK, world_size=dist.get_world_size())
        self.seen: list[int] = []

    def run(self, updates: float, at_end: Callable[[], None] | None = None) -> None:
        """Train until so many more updates are done; then ``at_end`` inside of the loop."""
        end = self.adaptation.updates + updates
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, inputs + 0.01 * torch.rand(()), targets)
            loss.backward()
            self.optimizer.step()
            self.stats["seen"] += len(inputs)
            self.seen += [round(float(number) * SAMPLES) for number in inputs[:, 0]]
            if self.adaptation.updates == end and self.loader.is_update_end:
                if at_end is not None:
                    at_end()
                return

    def saved(self, name: str, step: int) -> None:
        """Save this rank's part into a folder."""
        place = FOLDER / name
        place.mkdir(exist_ok=True)
        saver = worlds.Saver(place)
        saver.save(self.capture, step=step)
        saver.engine.close(worlds.WAIT_S)
        dist.barrier()

    def restored(self, name: str, step: int) -> None:
        """Load what all ranks have saved."""
        files = sorted((FOLDER / name).glob("*.closed"))
        located: list[tuple[Path, Shard]] = [(path, worlds.shard_of(path)) for path in files]
        with open_files(located) as segments:
            self.capture.load(segments, step=step)
            self.capture.put_orders(segments)

    def end(self) -> list[object]:
        """Return what must be the same."""
        with self.stats.synchronized():
            seen = self.stats["seen"]
        state = self.adaptation.state_dict()
        full = [
            p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.model.parameters()
        ]
        bits = [p.detach().numpy().tobytes().hex() for p in full]
        return [bits, json.dumps(state["noise"]), state["progress"], state["updates"], seen]


def same_bits(*, sharded: bool) -> bool:
    """Kill and restore four ranks; tell whether what follows is what would have followed."""
    name = f"same-{sharded}"
    torch.manual_seed(RANK)
    whole = Job(16, 2, sharded=sharded)
    torch.manual_seed(50 + RANK)
    whole.run(4)
    expected = whole.end()
    killed = Job(16, 2, sharded=sharded)
    torch.manual_seed(50 + RANK)
    killed.run(2, lambda: killed.saved(name, 2))
    again = Job(16, 2, sharded=sharded)
    torch.manual_seed(RANK)
    again.restored(name, 2)
    again.run(2)
    return expected == again.end()


def ranks_changed(*, sharded: bool) -> dict[str, object]:
    """Go from four ranks to one to three inside one pass; return what the model saw in all."""
    seen: list[int] = []
    ends: list[object] = []
    stages = ((4, 2), (2, 1), (4, math.inf)) if sharded else ((4, 2), (1, 1), (3, math.inf))
    for number, (size, updates) in enumerate(stages):
        with world(size) as inside:
            if inside:
                job = Job(sharded=sharded)
                if number:
                    job.restored(f"stage-{sharded}-{number - 1}", number)
                name = f"stage-{sharded}-{number}"
                job.run(updates, lambda job=job, name=name, n=number: job.saved(name, n + 1))
                seen += job.seen
                with job.stats.synchronized():
                    ends.append(
                        [job.stats["seen"], job.adaptation.updates, job.adaptation.progress]
                    )
    return {"seen": seen, "ends": ends}


def refused() -> list[str]:
    """Return what is said of what cannot be."""
    said = []
    for make in (
        lambda: elastic.AdaptiveDataLoader(data(), 3),
        lambda: elastic.adapt(net(), torch.optim.SGD(net().parameters(), 0.1)),
    ):
        try:
            make()
        except InvalidRequestError as error:
            said.append(error.message)
    return said


def main() -> None:
    """Do all of it and write the findings down."""
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    with world(4):
        for kind, size, micro in (
            ("ddp", 16, 1), ("ddp", 10, 1), ("ddp", 16, 2), ("fsdp", 16, 1), ("fsdp", 16, 2),
            ("hsdp", 16, 1),
        ):  # fmt: skip
            found[f"{kind} {size} {micro}"] = measured(kind, size, micro)
        found["summed"] = summed()
        found["agreed_on"] = agreed_on()
        found["refused"] = refused()
        for sharded in (False, True):
            found[f"same_bits {sharded}"] = same_bits(sharded=sharded)
    for sharded in (False, True):
        found[f"ranks_changed {sharded}"] = ranks_changed(sharded=sharded)
    for size in (1, 2, 4):
        with world(size) as inside:
            for kind, (*_, initial, _epochs) in trainings.KINDS.items():
                if inside:
                    found[f"{kind} {size} fixed"] = trainings.trained(kind, batch=initial, local=1)
                    scaled = trainings.trained(kind, batch=initial * size, local=initial)
                    found[f"{kind} {size} scaled"] = scaled
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

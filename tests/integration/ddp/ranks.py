"""One of four ranks: trains under DDP, saves on the way, and trains on from each save anew.

Prints one line of JSON: for each case and step that was saved, whether the parameters of the
resumed run are those of the run that went on, bit for bit, after each further step; with the
order of gradients put back, and without. And what becomes of an order that one rank cannot take.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from holdfast.core.shard import Shard
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture

_SPEC = importlib.util.spec_from_file_location(
    "worlds", Path(__file__).parents[2] / "unit" / "state" / "worlds.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
worlds = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(worlds)

STEPS = 6
CASES = {
    "plain": {"bucket_cap_mb": 0.004},
    "one_bucket": {},
    "view": {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True},
    "static": {"bucket_cap_mb": 0.004, "static_graph": True},
    "accumulate": {"bucket_cap_mb": 0.004},
    "hook": {"bucket_cap_mb": 0.004},
    "unused": {"bucket_cap_mb": 0.004, "find_unused_parameters": True},
}
SAVED_AT = (1, 2, 4)


class Net(nn.Module):
    """Gradients arrive in another order than parameters are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(41, 3)
        self.first = nn.Linear(33, 57)
        self.scale = nn.Parameter(torch.randn(57))
        self.middle = nn.Linear(57, 41)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return three numbers per sample."""
        output: torch.Tensor = self.last(
            torch.tanh(self.middle(torch.tanh(self.first(inputs)) * self.scale))
        )
        return output


def made(case: str) -> dict[str, object]:
    """Return a fresh wrapper and its optimizer."""
    torch.manual_seed(5)
    ddp = DistributedDataParallel(Net(), **CASES[case])
    if case == "hook":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return {"model": ddp, "optimizer": torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)}


def train(case: str, state: dict, step: int, rank: int) -> None:
    """Do one optimizer step."""
    torch.manual_seed(100 * step + rank)
    micro_count = 2 if case.startswith("accumulate") else 1
    for micro in range(micro_count):
        with state["model"].no_sync() if micro + 1 < micro_count else contextlib.nullcontext():
            state["model"](torch.randn(5, 33)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def bits(state: dict) -> list[bytes]:
    """Return the parameters as bytes."""
    return [p.detach().numpy().tobytes() for p in state["model"].parameters()]


def segments_of(folder: Path) -> list[tuple[Path, Shard]]:
    """Return what all ranks have saved in a folder."""
    return [(path, worlds.shard_of(path)) for path in sorted(folder.glob("*.closed"))]


def resumed(case: str, folder: Path, step: int, rank: int, *, put: bool) -> tuple[list, list]:
    """Return what each further step makes of the parameters, and what could not be put back."""
    state = made(case)
    capture = Capture(state, rank=rank, world_size=dist.get_world_size())
    with open_files(segments_of(folder)) as segments:
        capture.load(segments, step=step)
        reasons = capture.put_orders(segments) if put else []
    ends = []
    for later in range(step + 1, STEPS + 1):
        train(case, state, later, rank)
        ends.append(bits(state))
    if put and not reasons and rank == 0 and CASES[case].get("find_unused_parameters") is None:
        assert capture._orders["model"].known() is not None
    return ends, reasons


def run(case: str, folder: Path, rank: int) -> dict[str, object]:
    """Return the case's findings, by step."""
    state = made(case)
    capture = Capture(state, rank=rank, world_size=dist.get_world_size())
    expected = []
    for step in range(1, STEPS + 1):
        train(case, state, step, rank)
        expected.append(bits(state))
        if step in SAVED_AT:
            place = folder / f"{case}-{step}"
            place.mkdir(exist_ok=True)
            saver = worlds.Saver(place)
            saver.save(capture, step=step)
            saver.engine.close(worlds.WAIT_S)
    dist.barrier()
    found: dict[str, object] = {}
    for step in SAVED_AT:
        place = folder / f"{case}-{step}"
        ends, reasons = resumed(case, place, step, rank, put=True)
        without, _ = resumed(case, place, step, rank, put=False)
        found[str(step)] = {
            "same": ends == expected[step:],
            "without": without == expected[step:],
            "reasons": reasons,
        }
    return found


def one_unfit(folder: Path, rank: int) -> dict[str, object]:
    """Return what becomes of an order that the last rank cannot take: it froze a parameter."""
    state = made("plain")
    ddp = state["model"]
    ddp.module.scale.requires_grad_(rank != dist.get_world_size() - 1)
    reducer = ddp.reducer
    capture = Capture(state, rank=rank, world_size=dist.get_world_size())
    with open_files(segments_of(folder / "plain-2")) as segments:
        reasons = capture.put_orders(segments)
    return {"reasons": reasons, "kept": ddp.reducer is reducer}


def main() -> None:
    """Join the others and write the findings down."""
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    found = {case: run(case, folder, rank) for case in CASES}
    found["one_unfit"] = one_unfit(folder, rank)
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""What each rank plans before its first save: 10^5 tensors, each cut over 64 ranks.

Ours: every rank plans alone; what is timed is one of 64. The peer gathers the plans of all ranks
on one, which makes one of them: that is timed with a tenth of the tensors, because it takes
minutes and several GiB with all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from tests.bench.harness import RUNS_MIN, Record
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.snapshot.plan import make_plan
from holdfast.state.capture import Capture

NAMES = ("planner/dcp_save",)
RANKS = 64
RANK = 33
TENSORS_COUNT = 100_000
PEER_PART = 10
PLAN_S_MAX = 2.0


class Block(nn.Module):
    """Ten parameters, of each of which a sixty-fourth lies here."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        for at in range(10):
            here = torch.zeros(2, 8)
            whole = DTensor.from_local(here, mesh, [Shard(0)], run_check=False)
            self.register_parameter(f"weight_{at}", nn.Parameter(whole))


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the time of our plan, and in the note the peer's."""
    count = TENSORS_COUNT // (10 if quick else 1)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        model = nn.ModuleList(Block(mesh) for _ in range(count // 10))
        capture = Capture({"model": model}, rank=RANK, world_size=RANKS)
        ours_s = [_timed(lambda: _plan(capture)) for _ in range(1 + RUNS_MIN)][1:]
        few = dict([*model.state_dict().items()][: count // PEER_PART])
        local = create_default_local_save_plan(few, is_coordinator=False)
        peer_s = _timed(lambda: create_default_global_save_plan([local] * RANKS))
    finally:
        dist.destroy_process_group()
    value_s = statistics.median(ours_s)
    yield Record(
        name="planner/dcp_save",
        value=value_s,
        unit="s",
        peer="limit",
        peer_value=PLAN_S_MAX,
        ratio=value_s / PLAN_S_MAX,
        bytes=0,
        note=f"{count} tensors cut over {RANKS} ranks, one rank's plan, no coordinator; "
        f"{min(ours_s):.3g}..{max(ours_s):.3g} s, n={len(ours_s)}. DCP's coordinator, "
        f"create_default_global_save_plan of {len(few)} tensors on as many ranks: {peer_s:.3g} s, "
        "n=1, the ranks' plans and their gathering not counted",
        target=f"<= {PLAN_S_MAX:g} s",
        met=value_s <= PLAN_S_MAX,
    )


def _plan(capture: Capture) -> object:
    return make_plan(capture, job="j", run="r", generation=1, rank=RANK, world_size=RANKS)


def _timed(work: Callable[[], object]) -> float:
    begin = time.process_time()
    kept = work()
    took_s = time.process_time() - begin
    del kept
    return took_s

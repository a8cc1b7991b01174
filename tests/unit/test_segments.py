"""Segments found by name and box, other world sizes, and readers that have no Holdfast (P7)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import Shard
from holdfast.errors import ManifestError, NotFoundError, NotReadyError, TruncatedShardError
from holdfast.format.boxes import Box, whole
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture

_SPEC = importlib.util.spec_from_file_location(
    "holdfast_test_worlds", Path(__file__).with_name("state") / "worlds.py"
)
worlds = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(worlds)

FULL = torch.arange(24.0).reshape(4, 6)
BOXES = [Box((0, 0), (4, 2)), Box((0, 2), (3, 4)), Box((3, 2), (1, 4))]


def write(folder: Path, rank: int, boxes: list[Box]) -> tuple[Path, Shard]:
    specs = [TensorSpec(fqn="w", dtype="F32", shape=(4, 6), box=box) for box in boxes]
    shard_id = ShardId(RunId("r1"), Step(1), Generation(1), Rank(rank))
    identity = SegmentIdentity(id=shard_id, job="j", world_size=len(BOXES), plan_hash="p")
    template = header_template(identity, specs)
    data = template.fill(step=1, generation=1, parent=None)
    for box in boxes:
        data += FULL[box.within(whole((4, 6)))].contiguous().numpy().tobytes()
    path = folder / f"{rank}.seg"
    path.write_bytes(data)
    shard = Shard(
        id=shard_id,
        job="j",
        world_size=len(BOXES),
        plan_hash="p",
        length_bytes=len(data),
        root_digest=b"",
    )
    return path, shard


def test_a_tensor_is_put_together_from_whatever_boxes_there_are(tmp_path):
    """Any region, whoever saved it, also one inside a single box."""
    files = [write(tmp_path, rank, [box]) for rank, box in enumerate(BOXES)]
    with open_files(files) as segments:
        assert torch.equal(FULL, segments.tensor("w"))
        assert torch.equal(FULL[1:4, 1:5], segments.tensor("w", Box((1, 1), (3, 4))))
        assert torch.equal(FULL[1:3, 2:5], segments.tensor("w", Box((1, 2), (2, 3))))


def test_overlapping_pieces_hide_no_hole(tmp_path):
    """P1, P3; defect X1: what no piece holds is never made up from unwritten memory."""
    files = [write(tmp_path, rank, [Box((0, 0), (4, 3))]) for rank in range(2)]
    with open_files(files) as segments, pytest.raises(NotReadyError, match="missing"):
        segments.tensor("w")


def test_missing_pieces_are_named(tmp_path):
    with open_files([write(tmp_path, 0, BOXES[:1]), write(tmp_path, 1, BOXES[1:2])]) as held:
        with pytest.raises(NotReadyError, match=r"'w' are missing at \[0, 0\] \+ \[4, 6\]"):
            held.tensor("w")
        with pytest.raises(NotReadyError, match="'v'"):
            held.tensor("v")


def test_files_that_are_not_the_shard_are_refused(tmp_path):
    path, shard = write(tmp_path, 0, BOXES[:1])
    with pytest.raises(NotFoundError):
        open_files([(tmp_path / "gone", shard)])
    with pytest.raises(TruncatedShardError):
        open_files([(path, replace(shard, length_bytes=shard.length_bytes + 1))])
    other = replace(shard, id=replace(shard.id, rank=Rank(2)))
    with pytest.raises(ManifestError, match="lies where r1/1/1/2/0 should"):
        open_files([(path, other)])


@pytest.fixture
def group(tmp_path):
    """A process group of one: enough to build DDP, whose ranks are then pretended."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def rank_state(rank: int, seed: int, *, broadcast: bool = True) -> dict:
    """One rank of a DDP job: the same model on all, its own counters and plain module."""
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    options = {} if broadcast else {"forward_sync_buffers": False}
    model = nn.parallel.DistributedDataParallel(inner, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    own = nn.Linear(2, 2)
    with torch.no_grad():
        own.weight.fill_(rank)
        inner[1].running_mean.fill_(rank)
    return {"model": model, "optimizer": optimizer, "own": own, "at": {"rank": rank}}


@pytest.mark.filterwarnings("ignore:.*barrier.*")
@pytest.mark.parametrize(("saved", "loading"), [(2, 2), (2, 1), (2, 3), (1, 2), (3, 2)])
@pytest.mark.parametrize("broadcast", [True, False])
def test_a_checkpoint_loads_in_a_world_of_another_size(tmp_path, group, saved, loading, broadcast):
    """F37: replicated tensors are saved once; a rank takes that of r modulo the saved size."""
    states = [rank_state(r, 1, broadcast=broadcast) for r in range(saved)]
    captures = [Capture(s, rank=r, world_size=saved) for r, s in enumerate(states)]
    with worlds.save_all(tmp_path, captures) as segments:
        assert 1 == len(segments._pieces._held["model.0.weight"].places)
        fresh = [rank_state(r, 2, broadcast=broadcast) for r in range(loading)]
        draws = []
        for rank, state in enumerate(fresh):
            Capture(state, rank=rank, world_size=loading).load(segments, step=1)
            draws.append(torch.rand(1).item())

    for rank, state in enumerate(fresh):
        source = rank % saved
        wanted = states[0]["model"].module.state_dict()
        for name, tensor in state["model"].module.state_dict().items():
            if name == "1.running_mean":
                each = 0 if (broadcast or saved == 1) else source
                assert tensor.tolist() == [each] * 8
            else:
                assert torch.equal(wanted[name], tensor)
        moments = state["optimizer"].state_dict()["state"]
        for index, values in states[0]["optimizer"].state_dict()["state"].items():
            assert all(torch.equal(values[key], moments[index][key]) for key in values)
        own = 0 if saved == 1 else source
        assert state["at"]["rank"] == own
        assert state["own"].weight[0, 0].item() == own
    if saved != loading:
        assert len(set(draws)) == loading


@pytest.mark.filterwarnings("ignore:.*barrier.*")
def test_every_rank_notices_a_size_that_changes_under_its_name(group):
    """F37, P1; defect C8: or a tensor is shared out by old sizes here and by new ones there."""
    states = [rank_state(r, 1) for r in range(2)]
    plans = [worlds.plan_of(Capture(s, rank=r, world_size=2)) for r, s in enumerate(states)]
    for state in states:
        weight = state["model"].module[0].weight
        weight.data = torch.zeros(8, 40)

    assert [False, False] == [plan.is_current() for plan in plans]


READ_WITHOUT_HOLDFAST = """
import json, sys
sys.path[:] = [p for p in sys.path if "sdk" not in p]
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "holdfast":
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
folder = sys.argv[1]
plain = {}
for rank in range(2):
    plain.update(load_file(f"{folder}/{rank}.safetensors"))
wanted = {name: torch.zeros_like(t) for name, t in plain.items()}
dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
same = (plain[n].view(torch.uint8).equal(t.view(torch.uint8)) for n, t in wanted.items() if t.dim())
assert all(same)
print(json.dumps({n: t.double().sum().item() for n, t in wanted.items() if n.startswith("model.")}))
"""


@pytest.mark.filterwarnings("ignore:.*barrier.*")
def test_what_is_saved_needs_no_holdfast_to_be_read(tmp_path, group):
    """P7: by safetensors, and by plain PyTorch in a process that cannot import us."""
    states = [rank_state(r, 1) for r in range(2)]
    captures = [Capture(s, rank=r, world_size=2) for r, s in enumerate(states)]
    folder = tmp_path / "step-1"
    folder.mkdir()
    saver = worlds.Saver(tmp_path)
    for rank, capture in enumerate(captures):
        path, _ = saver.save(capture)
        path.rename(folder / f"{rank}.safetensors")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_WITHOUT_HOLDFAST, folder],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert 0 == done.returncode, done.stderr
    wanted = {
        f"model.{name}": tensor.double().sum().item()
        for name, tensor in states[0]["model"].module.state_dict().items()
    }

    assert wanted == json.loads(done.stdout)

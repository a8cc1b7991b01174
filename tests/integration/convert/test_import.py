"""What comes in can be trained on; Holdfast's own checkpoints move between stores (F89, P6)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.integration.convert import made
from tests.servers.nursery import QUICK
from torch import nn

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.verify import verify
from holdfast.convert.copying import checkpoints, copy_checkpoint
from holdfast.convert.exporting import export
from holdfast.convert.importing import open_source, place_for, write_checkpoint
from holdfast.convert.reading import CheckpointReader
from holdfast.convert.source import Chosen, Selection
from holdfast.core.shard import Shard
from holdfast.errors import AlreadyExistsError, DigestMismatchError, PreconditionError
from holdfast.format import keys
from holdfast.objectstore import open_store
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture

pytestmark = pytest.mark.filterwarnings("ignore:.*single process:UserWarning")

SDK = Path(__file__).parents[3] / "sdk"


def taken_in(store, source, **selection) -> CheckpointFolder:
    where = place_for(store, "new", 3)
    chosen = Chosen(source, Selection(**selection))
    write_checkpoint(store, chosen, job="new", checkpoint=where)
    return CheckpointFolder(store, keys.folder("new", where))


def load(folder: CheckpointFolder, root: Path, state: dict) -> None:
    """Load as a rank does once its agent has the segments."""
    shards: tuple[Shard, ...] = folder.manifest().shards
    with open_files([(root / folder.segment_key(s), s) for s in shards]) as segments:
        Capture(state, rank=0, world_size=1, rng=False).load(segments, step=3)


def test_weights_imported_as_a_module_are_restored_into_it(store, tmp_path):
    """``holdfast import x.pt --job new --as model``, then ``Checkpointer("new", {"model": m})``."""
    torch.manual_seed(1)
    there, here = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(there.state_dict(), tmp_path / "x.pt")
    load(
        taken_in(store, open_source(tmp_path / "x.pt"), add="model"),
        tmp_path / "store",
        {"model": here},
    )

    assert torch.equal(there.weight, here.weight)
    assert torch.equal(there.bias, here.bias)


def test_imported_weights_fill_a_module_that_lies_differently(store, tmp_path):
    """Defect A2: the file is in C order, the module here is not; values go where they belong."""
    torch.manual_seed(1)
    there, here = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    torch.save(there.state_dict(), tmp_path / "x.pt")
    folder = taken_in(store, open_source(tmp_path / "x.pt"), add="model")
    load(folder, tmp_path / "store", {"model": here})

    assert torch.equal(there.weight, here.weight)
    assert here.weight.is_contiguous(memory_format=torch.channels_last)


def test_what_a_torch_file_keeps_as_conjugate_or_negative_comes_in_as_it_reads(store, tmp_path):
    """torch writes the memory and a mark: the bytes alone are of other values."""
    values = torch.tensor([1 + 2j, 3 - 4j])
    marked = {"m.a": values.conj(), "m.b": torch._neg_view(torch.tensor([1.0, -2.0]))}
    torch.save(marked, tmp_path / "x.pt")

    with CheckpointReader(taken_in(store, open_source(tmp_path / "x.pt"))) as reader:
        found = dict(reader.tensors(["m.a", "m.b"]))

    assert found["m.a"].tolist() == [1 - 2j, 3 + 4j]
    assert found["m.b"].tolist() == [-1.0, 2.0]


def test_a_safetensors_file_of_any_name_is_known_by_its_content(tmp_path):
    """What ``holdfast export x weights --format safetensors`` wrote comes back (F89)."""
    save_file({"a": torch.arange(3)}, tmp_path / "weights")

    assert ["a"] == [spec.fqn for spec in open_source(tmp_path / "weights").specs()]


def test_plain_values_of_a_torch_file_come_along(store, tmp_path):
    there, here = nn.Linear(3, 2), nn.Linear(3, 2)
    saved = {"model": there.state_dict(), "epoch": 4, "history": [0.5, (1, None)]}
    torch.save(saved, tmp_path / "x.pt")
    state = {"model": here, "epoch": 0, "history": []}
    load(taken_in(store, open_source(tmp_path / "x.pt")), tmp_path / "store", state)

    assert torch.equal(there.weight, here.weight)
    assert (4, [0.5, (1, None)]) == (state["epoch"], state["history"])


SHARDED = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
folder = sys.argv[1]
other = os.fork()
rank = 1 if other else 0
dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=2)
full = torch.arange(35.0).reshape(7, 5).to(torch.bfloat16)
mesh = init_device_mesh("cpu", (2,))
dcp.save({"model": {"w": distribute_tensor(full, mesh, [Shard(0)]), "n": 3}}, checkpoint_id=folder)
dist.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def script(text: str, *arguments: object) -> str:
    """Run Python in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{QUICK}:{SDK}", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dcp_folder_of_two_ranks_is_put_together(tmp_path):
    """DTensor rows that do not divide evenly, written by torch itself."""
    script(SHARDED, tmp_path / "dcp")
    source = open_source(tmp_path / "dcp")
    found = dict(source.tensors(["model.w"]))

    assert torch.equal(torch.arange(35.0).reshape(7, 5).to(torch.bfloat16), found["model.w"])
    assert {"model.n": 3} == source.values()


def test_a_checkpoint_moves_to_another_store_byte_for_byte(folder, tmp_path):
    """All ranks and volumes, manifest last, and the index with them; a second time is nothing."""
    other = open_store(str(tmp_path / "other"), make=True)
    made, new = copy_checkpoint(folder, other)
    again, renewed = copy_checkpoint(folder, other)

    assert (True, False) == (new, renewed)
    assert folder.manifest() == made == again
    keys_there = sorted(entry.key for entry in other.list())
    for entry in folder.store.list():
        assert (tmp_path / "other" / entry.key).read_bytes() == (
            tmp_path / "store" / entry.key
        ).read_bytes()
    assert keys.index_key(made.job, made.checkpoint.run, made.plan) in keys_there


def test_a_copied_checkpoint_can_get_another_name(folder, tensors, tmp_path):
    """The name is in every header: digests are new, tensors and lineage are not."""
    other = open_store(str(tmp_path / "other"), make=True)
    made, _ = copy_checkpoint(folder, other, job="a-much-longer-name/" + "x" * 90)
    _, renewed = copy_checkpoint(folder, other, job="a-much-longer-name/" + "x" * 90)
    there = next(checkpoints(other))

    assert not renewed
    assert all(verdict.ok for verdict in verify(there, made))
    old = folder.manifest()
    assert made.checkpoint.run != old.checkpoint.run
    assert (made.notes, made.checkpoint) == (
        old.notes,
        replace(old.checkpoint, run=made.checkpoint.run),
    )
    assert made.parent == replace(old.parent, run=made.checkpoint.run)
    with CheckpointReader(there) as reader:
        names = [spec.fqn for spec in reader.specs()]
        found = dict(reader.tensors(names))
    assert sorted(tensors) == sorted(found)
    assert torch.equal(tensors["optimizer.state.w.exp_avg"], found["optimizer.state.w.exp_avg"])


def test_a_copy_goes_on_where_it_was_killed(folder, tmp_path):
    """Shards that are there are not sent again, and no manifest stands before all of them."""
    other = open_store(str(tmp_path / "other"), make=True)
    shard = tmp_path / "store" / folder.segment_key(folder.manifest().shards[1])
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(DigestMismatchError):
        copy_checkpoint(folder, other)

    assert [] == list(checkpoints(other))
    shard.write_bytes(good)
    first = tmp_path / "other" / folder.segment_key(folder.manifest().shards[0])
    written_ns = first.stat().st_mtime_ns if first.exists() else None
    copy_checkpoint(folder, other)
    assert [folder.prefix] == [found.prefix for found in checkpoints(other)]
    assert written_ns in (None, first.stat().st_mtime_ns)


def test_a_copy_never_mixes_with_another_run_of_the_name(folder, store, tensors, tmp_path):
    other = open_store(str(tmp_path / "other"), make=True)
    made.put(other, made.two_ranks(tensors), run="r2")
    with pytest.raises(PreconditionError, match=r"exists here \(run r2\)"):
        copy_checkpoint(folder, other)


def test_another_checkpoint_in_the_same_place_is_left_alone(folder, store, tmp_path):
    other = open_store(str(tmp_path / "other"), make=True)
    copy_checkpoint(folder, other)
    with CheckpointReader(folder) as reader:
        export(reader, tmp_path / "x.pt", "torch")
    where = folder.manifest().checkpoint
    different = open_store(str(tmp_path / "different"), make=True)
    write_checkpoint(different, open_source(tmp_path / "x.pt"), job="team/gpt", checkpoint=where)
    with pytest.raises(AlreadyExistsError):
        copy_checkpoint(CheckpointFolder(different, folder.prefix), other)

    assert folder.manifest() == CheckpointFolder(other, folder.prefix).manifest()


MEASURED = """
import sys, threading, time
from pathlib import Path
import torch
from holdfast.bucket.folder import CheckpointFolder
from holdfast.convert.exporting import export
from holdfast.convert.importing import open_source, place_for, write_checkpoint
from holdfast.convert.reading import CheckpointReader
from holdfast.objectstore import open_store

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

root, prefix, dest = sys.argv[1:]
store, before, peak = open_store(root), anonymous(), 0
threading.Thread(target=watch, daemon=True).start()
with CheckpointReader(CheckpointFolder(store, prefix)) as reader:
    for form in ("dcp", "torch"):
        export(reader, Path(dest) / form, form)
for form in ("dcp", "torch"):
    source = open_source(Path(dest) / form)
    write_checkpoint(store, source, job=form, checkpoint=place_for(store, form, 0))
print((peak - before) >> 20)
"""


@pytest.fixture
def fast_folder():
    """A folder in memory: the disk is not what is measured."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-test-") as folder:
        yield Path(folder)


def test_memory_does_not_grow_with_the_checkpoint(fast_folder):
    """600 MiB in tensors of 4 MiB, out in the formats that want all at once, and in again.

    A window of 128 MiB, 64 MiB read ahead and what the allocator keeps: half of it, however big.
    """
    store = open_store(str(fast_folder / "store"), make=True)
    tensors = {f"model.{at}": torch.full((1024, 1024), float(at)) for at in range(150)}
    folder = made.put(store, made.two_ranks(tensors))
    del tensors
    peak_mib = int(script(MEASURED, fast_folder / "store", folder.prefix, fast_folder))

    assert folder.manifest().length_bytes >> 20 >= 600
    assert peak_mib <= 300

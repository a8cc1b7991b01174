"""What is exported is what was saved, as each format's own tool reads it; and back again (F89)."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from torch.distributed import checkpoint as dcp

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.verify import verify
from holdfast.convert.exporting import FORMATS, export
from holdfast.convert.importing import open_source, place_for, write_checkpoint
from holdfast.convert.reading import CheckpointReader
from holdfast.convert.safetensors_files import write_folder
from holdfast.convert.source import Chosen, Selection
from holdfast.format.keys import folder as folder_of

# Its file format has the dtype, its Python reader does not know it yet.
UNREAD_BY_SAFETENSORS = "model.F8_E8M0"

pytestmark = pytest.mark.filterwarnings("ignore:.*single process:UserWarning")


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit: NaN equals itself, and a shape is part of it."""
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(*raw)


def assert_same(expected, found):
    assert sorted(expected) == sorted(found)
    assert [] == [name for name in expected if not same(expected[name], found[name])]


def read(source) -> dict[str, torch.Tensor]:
    names = [spec.fqn for spec in source.specs()]
    return {name: tensor.clone() for name, tensor in source.tensors(names)}


def test_a_tensor_is_put_together_from_boxes_of_all_ranks_and_volumes(reader, tensors):
    assert_same(tensors, read(reader))
    assert {0: 0, 1: 1} == {rank: s["live"]["rank"] for rank, s in reader.state().items()}


def test_safetensors_reads_the_single_file(reader, tensors, tmp_path):
    dest = tmp_path / "all.safetensors"

    assert [dest, tmp_path / "all.state.json"] == export(reader, dest, "safetensors")

    with safetensors.safe_open(dest, "pt") as file:
        known = [name for name in file.keys() if name != UNREAD_BY_SAFETENSORS]  # noqa: SIM118
        found = {name: file.get_tensor(name) for name in known}
        assert sorted(tensors) == sorted(file.keys())
    assert_same({k: v for k, v in tensors.items() if k != UNREAD_BY_SAFETENSORS}, found)
    assert 1 == json.loads((tmp_path / "all.state.json").read_text())["1"]["live"]["rank"]


def test_a_hugging_face_folder_says_where_each_tensor_is(reader, tensors, tmp_path):
    """Read as transformers does: the index, then each file it names."""
    write_folder(reader, tmp_path / "hf", lambda _: None, shard_bytes_max=200)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})

    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "hf" / file, "pt") as held:
            assert name in held.keys()  # noqa: SIM118
            if name != UNREAD_BY_SAFETENSORS:
                assert same(tensors[name], held.get_tensor(name))
    assert_same(tensors, read(open_source(tmp_path / "hf")))


def test_names_can_be_those_that_a_model_expects(reader, tensors, tmp_path):
    """``--only model --strip model``: no state beside, nothing of the optimizer."""
    chosen = Chosen(reader, Selection(only=("model",), strip="model"))
    export(chosen, tmp_path / "hf", "hf")
    with safetensors.safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        names = sorted(file.keys())

    assert sorted(k.removeprefix("model.") for k in tensors if k.startswith("model.")) == names
    assert ["model.safetensors"] == [path.name for path in (tmp_path / "hf").iterdir()]


def test_torch_distributed_checkpoint_loads_the_folder(reader, tensors, tmp_path):
    export(reader, tmp_path / "dcp", "dcp")
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    found["holdfast.rank.1"] = {}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)

    assert {"static": {}, "live": {"rank": 1}} == found.pop("holdfast.rank.1")
    assert_same(tensors, found)


def test_torch_loads_the_file_with_weights_only(reader, tensors, tmp_path):
    export(reader, tmp_path / "all.pt", "torch")
    found = torch.load(tmp_path / "all.pt", weights_only=True)

    assert {"static": {}, "live": {"rank": 0}} == found.pop("holdfast.rank.0")
    assert {"static": {}, "live": {"rank": 1}} == found.pop("holdfast.rank.1")
    assert_same(tensors, found)
    assert ["all.pt"] == [p.name for p in tmp_path.iterdir() if p.is_file()]


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_imported_exports_as_it_was(form, reader, tensors, store, tmp_path):
    """Out, in, out: tensors and the state of every rank."""
    dest = tmp_path / ("out.safetensors" if form == "safetensors" else "out")
    export(reader, dest, form)
    source = open_source(dest)
    where = place_for(store, "again", 5)
    made = write_checkpoint(store, source, job="again", checkpoint=where)
    folder = CheckpointFolder(store, folder_of("again", where))

    assert [True] == [verdict.ok for verdict in verify(folder, made)]
    with CheckpointReader(folder) as again:
        assert_same(tensors, read(again))
        assert reader.state() == again.state()
        second = dest.with_name(f"again-{dest.name}")
        export(again, second, form)
    assert_same(tensors, read(open_source(second)))

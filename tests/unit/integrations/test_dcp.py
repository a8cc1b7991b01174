"""F7, P1, P9: what DCP of torch gives to Holdfast and gets back; one process, without a group."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections import OrderedDict, deque
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import holdfast
from holdfast.errors import InvalidRequestError
from holdfast.format.segment import header_length
from holdfast.integrations.dcp import HoldfastJob, HoldfastReader, HoldfastWriter, reader, writer
from holdfast.objectstore.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SHAPES = [(), (0,), (3, 0, 2), (5,), (4, 3)]


def save(state, path, **options):
    dcp.save(state, checkpoint_id=path, storage_writer=HoldfastWriter(**options))


def load(state, path):
    dcp.load(state, checkpoint_id=path, storage_reader=HoldfastReader())
    return state


def trained(seed, steps=1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("ours", "theirs"), [(HoldfastWriter, StorageWriter), (HoldfastReader, StorageReader)]
)
def test_every_method_of_the_installed_torch_is_there_and_takes_its_arguments(ours, theirs):
    """F7"""
    assert theirs.__abstractmethods__
    assert not ours.__abstractmethods__
    for name in theirs.__abstractmethods__:
        here, there = (inspect.signature(getattr(cls, name)).parameters for cls in (ours, theirs))
        kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        wanted = [key for key, parameter in there.items() if parameter.kind not in kinds]

        assert wanted == list(here)[: len(wanted)], name


def test_torch_tells_the_writer_its_rank_and_does_not_read_metadata_twice():
    """F7: torch looks whether a parameter is called ``kwargs``."""
    writer = inspect.signature(HoldfastWriter.set_up_storage_writer).parameters
    reader = inspect.signature(HoldfastReader.read_metadata).parameters

    assert "kwargs" in writer
    assert "kwargs" not in reader


def test_model_and_optimizer_come_back_by_the_names_of_torch(tmp_path):
    """F7"""
    model, optimizer = trained(1)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    save({"model": of_model, "optimizer": of_optimizer}, tmp_path / "c")
    other, its = trained(2, steps=3)
    of_model, of_optimizer = get_state_dict(other, its)
    found = load({"model": of_model, "optimizer": of_optimizer}, tmp_path / "c")
    set_state_dict(other, its, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert str(optimizer.state_dict()) == str(its.state_dict())


def test_all_kinds_of_values_and_shapes_come_back(tmp_path):
    dtypes = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64
    tensors = {
        f"{dtype}.{shape}": torch.ones(shape).to(dtype) for dtype in dtypes for shape in SHAPES
    }
    values = {
        "n": 2**70, "f": float("nan"), "text": "x", "none": None, "bytes": b"\0", "set": {1},
        "pair": (1, (2,)), "deque": deque([1], 3), "array": np.arange(3), "size": torch.Size([2]),
        "list": [1, 2], "ordered": [OrderedDict(b=1, a=2)],
    }  # fmt: skip
    save({"t": tensors, "turned": torch.arange(6).view(2, 3).t(), **values}, tmp_path / "c")
    target = {
        "t": {name: torch.zeros_like(t) for name, t in tensors.items()},
        "turned": torch.zeros(3, 2, dtype=torch.int64),
        **dict.fromkeys(values), "ordered": [{"b": 0, "a": 0}],
    }  # fmt: skip
    found = load(target, tmp_path / "c")

    assert all(torch.equal(tensors[name], found["t"][name]) for name in tensors)
    assert torch.equal(torch.arange(6).view(2, 3).t(), found["turned"])
    for name, value in values.items():
        assert str(value) == str(found[name]) or name == "ordered", name
        assert type(value) is type(found[name]), name
    assert [{"b": 1, "a": 2}] == found["ordered"]
    assert 3 == found["deque"].maxlen


def test_holdfast_load_and_save_share_the_checkpoints(tmp_path):
    """The state of DCP is a tree of Holdfast, and tensors of any checkpoint have DCP's names."""
    model, optimizer = trained(1)
    save({"m": model.state_dict(), "n": [torch.ones(2), 3]}, tmp_path / "dcp", notes={"a": 1})
    state = {"m": dict.fromkeys(model.state_dict()), "n": None}
    loaded = holdfast.load(tmp_path / "dcp", state)
    holdfast.save(tmp_path / "own", {"m": model, "o": optimizer, "x": {"t": torch.ones(1), "n": 5}})
    other = {"m": trained(2)[0].state_dict(), "x": {"t": torch.zeros(1), "n": 0}}
    load(other, tmp_path / "own")

    with HoldfastReader(tmp_path / "own") as reader:
        names = reader.read_metadata().state_dict_metadata.keys()

    assert not {"m", "o"} & names  # objects are there by their tensors
    assert {"a": 1} == loaded.notes
    assert torch.equal(torch.ones(2), state["n"][0])
    assert 3 == state["n"][1]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state["m"][name])
        assert torch.equal(tensor, other["m"][name])
    assert {"t": torch.ones(1), "n": 5} == other["x"]


def test_a_checkpoint_is_loaded_without_a_state_to_load_into(tmp_path):
    save({"a": {"t": torch.ones(2), "n": [{"x": 1}]}, "b": 2}, tmp_path / "c")
    reader = HoldfastReader(tmp_path / "c")
    found = _load_state_dict_from_keys("a", storage_reader=reader)

    assert {"a"} == found.keys()
    assert torch.equal(torch.ones(2), found["a"]["t"])
    assert [{"x": 1}] == found["a"]["n"]


def test_another_dtype_is_converted_as_torch_does(tmp_path):
    save({"t": torch.arange(3.0)}, tmp_path / "c")

    found = load({"t": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "c")
    assert torch.equal(torch.arange(3, dtype=torch.bfloat16), found["t"])


def test_a_planner_is_told_of_each_tensor_that_is_there(tmp_path):
    """One that scales or splits what was loaded does it then."""
    told = []

    class Planner(DefaultLoadPlanner):
        def commit_tensor(self, read_item, tensor):
            told.append((read_item.dest_index.fqn, tensor.tolist()))

    save({"t": torch.arange(3.0), "n": 1}, tmp_path / "c")
    state = {"t": torch.zeros(3), "n": 0}
    dcp.load(
        state, checkpoint_id=tmp_path / "c", storage_reader=HoldfastReader(), planner=Planner()
    )

    assert [("t", [0.0, 1.0, 2.0])] == told


def test_a_reader_leaves_no_thread_behind_that_reads(tmp_path):
    """Nor one that was asked for another checkpoint before it was asked for tensors."""
    save({"t": torch.ones(3)}, tmp_path / "c")
    before = set(threading.enumerate())
    with HoldfastReader(tmp_path / "c") as reader:
        dcp.load({"t": torch.zeros(3)}, storage_reader=reader)
        assert before == set(threading.enumerate())
        reader.read_metadata()
        reading = threading.active_count()
        reader.read_metadata()
        assert len(before) < reading == threading.active_count()
        reader.reset()
        assert before == set(threading.enumerate())
        reader.read_metadata()

    assert before == set(threading.enumerate())


def test_one_writer_serves_several_saves_with_and_without_an_id(tmp_path):
    """F7: ``reset`` comes only with a ``checkpoint_id``."""
    writer, reader = HoldfastWriter(tmp_path / "a"), HoldfastReader(tmp_path / "a")
    dcp.save({"n": 1}, storage_writer=writer)
    dcp.save({"n": 2}, storage_writer=writer)
    dcp.save({"n": 3}, checkpoint_id=tmp_path / "b", storage_writer=writer)
    dcp.save({"n": 4}, storage_writer=pickle.loads(pickle.dumps(writer)))
    found = [{"n": 0}, {"n": 0}]
    dcp.load(found[0], storage_reader=reader)
    dcp.load(found[1], checkpoint_id=str(tmp_path / "b"), storage_reader=reader)

    assert [{"n": 2}, {"n": 4}] == found
    assert str(tmp_path / "b") == reader.checkpoint_id
    writer.reset()
    assert str(tmp_path / "b") == writer.checkpoint_id


def test_a_checkpoint_may_be_protected_from_being_replaced(tmp_path):
    save({"n": 1}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="holds a checkpoint already"):
        save({"n": 2}, tmp_path / "c", overwrite=False)

    assert not (tmp_path / "c" / writer.SAVE).exists()
    assert {"n": 1} == load({"n": 0}, tmp_path / "c")


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {"b": nn.Linear(1, 1).forward}}, "a.b'"),
        ({"a": (1, torch.ones(1))}, "a.1' is a tensor in a value that DCP does not take apart"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, "a'"),
        ({"rank": {"0": torch.ones(1)}}, "rank.0'"),
        ({"holdfast": 1}, "holdfast'"),
    ],
)
def test_what_cannot_be_saved_is_named_and_the_old_checkpoint_stays(tmp_path, state, named):
    """P1, P9"""
    save({"n": 1}, tmp_path / "c")
    with pytest.raises(CheckpointException, match=f"'{named}"):
        save(state, tmp_path / "c")

    assert {"n": 1} == load({"n": 0}, tmp_path / "c")


@pytest.mark.parametrize("change", [{"run": "f" * 32}, {"volume": 1}], ids=["run", "rank"])
def test_a_segment_of_another_save_is_refused_and_the_old_checkpoint_stays(tmp_path, change):
    class Mixed(HoldfastWriter):
        def write_data(self, plan, planner):
            done = super().write_data(plan, planner)
            told = done.value()
            sent = told[-1].storage_data
            shard = replace(sent.sidecar.shard, id=replace(sent.sidecar.shard.id, **change))
            sent = replace(sent, sidecar=replace(sent.sidecar, shard=shard))
            told[-1] = replace(told[-1], storage_data=sent)
            done = torch.futures.Future()
            done.set_result(told)
            return done

    save({"n": 1}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="another save is writing"):
        dcp.save({"n": 2}, checkpoint_id=tmp_path / "c", storage_writer=Mixed())

    assert {"n": 1} == load({"n": 0}, tmp_path / "c")


def test_damage_is_seen_and_nothing_of_it_used(tmp_path):
    save({"t": torch.ones(100)}, tmp_path / "c")
    segment = tmp_path / "c" / "shard-00000-of-00001.safetensors"
    data = bytearray(segment.read_bytes())
    data[header_length(bytes(data[:8])) + 8] ^= 1
    segment.write_bytes(data)
    target = {"t": torch.zeros(100)}

    with pytest.raises(CheckpointException, match="DigestMismatchError"):
        load(target, tmp_path / "c")
    assert torch.equal(torch.zeros(100), target["t"])


def test_a_planner_of_ones_own_is_read_without_pickle(tmp_path):
    """P9: what it has pickled is read as plain data, or refused."""

    class Planner(DefaultSavePlanner):
        pass

    class Foreign(dcp.SavePlanner):
        """Delegates, as one that is none of torch's."""

        def __init__(self):
            self._inner = Planner()

        def __getattribute__(self, name):
            if name.startswith("_"):
                return super().__getattribute__(name)
            return getattr(self._inner, name)

        create_local_plan = create_global_plan = finish_plan = resolve_data = set_up_planner = None

    writer = HoldfastWriter(tmp_path / "c")
    dcp.save({"n": [1, "a"]}, storage_writer=writer, planner=Foreign())

    assert {"n": [1, "a"]} == load({"n": None}, tmp_path / "c")


def test_calls_that_cannot_work_say_so(tmp_path):
    for wrong in ({"storage_writer": HoldfastWriter()}, {"use_collectives": False}):
        options = {"storage_writer": HoldfastWriter(tmp_path / "c"), **wrong}
        with pytest.raises((CheckpointException, InvalidRequestError), match=r"path|use_coll"):
            dcp.save({"n": 1}, **options)
    with pytest.raises(InvalidRequestError, match="notes"):
        HoldfastWriter(notes={"a": object()})
    with pytest.raises(CheckpointException, match="is missing"):
        load({"n": 0}, tmp_path / "nothing")
    assert HoldfastWriter.validate_checkpoint_id(tmp_path)
    assert HoldfastReader.validate_checkpoint_id("s3://bucket/prefix")
    assert not HoldfastReader.validate_checkpoint_id("gs://bucket/prefix")


class GoneError(Exception):
    """A store that is gone."""


class Faulty(MemoryStore):
    """Fails at the ``at``-th writing operation."""

    def __init__(self):
        super().__init__()
        self.at = self.count = 0

    def close(self):
        """Stay: it is in memory."""

    def __getattribute__(self, name):
        if name in ("put", "delete", "begin", "put_part", "finish"):
            self.count += 1
            if self.count == self.at:
                raise GoneError(name)
        return super().__getattribute__(name)


def test_a_save_that_fails_anywhere_leaves_one_of_both_or_nothing_torn(monkeypatch):
    """P1: until the exchange it is the old one; the next save goes through."""
    store = Faulty()
    for module in (reader, writer):
        monkeypatch.setattr(module, "open_store", lambda path, *, make=False: store)
    save({"n": 0, "t": torch.zeros(2)}, "memory:")
    seen = []
    for at in range(1, 100):
        store.count, store.at = 0, at
        try:
            save({"n": at, "t": torch.full((2,), float(at))}, "memory:")
        except CheckpointException:
            store.at = 0
        else:
            break
        assert [] == list(store.open_uploads())
        try:
            found = load({"n": -1, "t": torch.zeros(2)}, "memory:")
        except CheckpointException:
            seen.append("nothing")
            assert "manifest.json" not in [each.key for each in store.list()]
            save({"n": 0, "t": torch.zeros(2)}, "memory:")
            continue
        assert torch.equal(torch.full((2,), float(found["n"])), found["t"])
        seen.append("old" if found["n"] == 0 else "new")

    assert "new" not in seen
    assert seen == sorted(seen, reverse=True), seen  # old, and then nothing
    assert seen.count("old") >= 6


def test_slots_that_no_rank_can_have_are_refused_before_an_agent_is_asked():
    """F43."""
    with pytest.raises(InvalidRequestError, match="slots=17 must be 2 to 16"):
        HoldfastJob("job", slots=17)

"""F1, P9: torch's own arguments, a checkpoint in place of the pickle."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import DigestMismatchError, InvalidRequestError, NotFoundError
from holdfast.integrations import torch_io


class Evil:
    """Says so when it is unpickled."""

    ran = False

    def __reduce__(self):
        return setattr, (Evil, "ran", True)


@pytest.fixture(autouse=True)
def harmless():
    Evil.ran = False


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    """F1"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3,
        "loss": [0.5, float("inf")], "pair": (torch.arange(3), None), 7: "seven",
    }  # fmt: skip
    torch_io.save(saved, tmp_path / "c")
    found = torch_io.load(tmp_path / "c")

    assert list(saved) == list(found)
    assert type(found["model"]) is OrderedDict
    assert model.state_dict()._metadata == found["model"]._metadata
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, found["model"][name])
    assert (3, [0.5, float("inf")], "seven") == (found["epoch"], found["loss"], found[7])
    assert torch.equal(torch.arange(3), found["pair"][0])
    optimizer.load_state_dict(found["optimizer"])
    assert saved["optimizer"]["param_groups"] == found["optimizer"]["param_groups"]


@pytest.mark.parametrize("name", ["file", "memory", "s3"])
def test_a_file_of_torch_may_be_called_as_a_store_is(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": 1}, name)

    assert torch_io.load(name) == {"a": 1}


@pytest.mark.parametrize("value", [torch.ones(2, 3), 5, [1, torch.zeros(1)]])
def test_what_is_saved_need_not_be_a_dict(tmp_path, value):
    torch_io.save(value, str(tmp_path / "c"))

    assert str(value) == str(torch_io.load(str(tmp_path / "c")))


def test_a_second_save_replaces_the_first(tmp_path):
    torch_io.save({"n": 1}, tmp_path / "c")
    torch_io.save({"n": 2}, tmp_path / "c")

    assert {"n": 2} == torch_io.load(tmp_path / "c")


@pytest.mark.parametrize("where", ["meta", torch.device("meta"), {"cpu": "meta"}])
def test_tensors_go_where_map_location_says(tmp_path, where):
    torch_io.save({"a": [torch.ones(2)], "b": (torch.ones(1),)}, tmp_path / "c")
    found = torch_io.load(tmp_path / "c", map_location=where)

    assert found["a"][0].is_meta
    assert found["b"][0].is_meta


def test_a_function_as_map_location_gives_the_storage(tmp_path):
    torch_io.save([torch.arange(4.0).view(2, 2)], tmp_path / "c")
    asked = []
    zeros = torch.zeros(4)

    def where(storage, location):
        asked.append((storage.nbytes(), location))
        return zeros.untyped_storage()

    (found,) = torch_io.load(tmp_path / "c", where)

    assert [(16, "cpu")] == asked
    assert torch.equal(torch.zeros(2, 2), found)
    assert found.data_ptr() == zeros.data_ptr()


@pytest.mark.parametrize("value", [nn.Linear(1, 1), Evil(), {"deep": [Evil()]}])
def test_what_only_pickle_could_express_is_refused_by_name(tmp_path, value):
    with pytest.raises(InvalidRequestError, match="state_dict"):
        torch_io.save({"here": value}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_file_of_torch_is_loaded_without_pickle_unless_asked_for_by_name(tmp_path, monkeypatch):
    """F1, P9"""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"t": torch.ones(2)}, tmp_path / "plain.pt")
    torch.save({"evil": Evil()}, tmp_path / "evil.pt")

    assert torch.equal(torch.ones(2), torch_io.load(tmp_path / "plain.pt", "cpu")["t"])
    with pytest.raises(pickle.UnpicklingError):
        torch_io.load(tmp_path / "evil.pt")
    assert not Evil.ran
    torch_io.load(tmp_path / "evil.pt", weights_only=False)
    assert Evil.ran


def test_an_object_to_write_into_is_torchs_own(tmp_path):
    buffer = io.BytesIO()
    torch_io.save({"t": torch.ones(2)}, buffer)
    buffer.seek(0)

    assert torch.equal(torch.ones(2), torch_io.load(buffer)["t"])


def test_damage_is_seen(tmp_path):
    torch_io.save(torch.ones(1000), tmp_path / "c")
    (segment,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(segment.read_bytes())
    data[-100] ^= 1
    segment.write_bytes(data)

    with pytest.raises(DigestMismatchError):
        torch_io.load(tmp_path / "c")


def test_what_is_not_there_and_what_is_none_of_ours(tmp_path):
    (tmp_path / "empty").mkdir()
    torch.save(1, tmp_path / "file.pt")
    holdfast.save(tmp_path / "other", {"n": 1})

    with pytest.raises(FileNotFoundError):
        torch_io.load(tmp_path / "nothing")
    with pytest.raises(NotFoundError):
        torch_io.load(tmp_path / "empty")
    with pytest.raises(InvalidRequestError, match=r"holdfast\.load"):
        torch_io.load(tmp_path / "other")
    with pytest.raises(InvalidRequestError, match="is a file"):
        torch_io.save(1, tmp_path / "file.pt")

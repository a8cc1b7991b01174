"""A path in, a checkpoint out (F20, F73): one process, a directory and a store in memory."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import holdfast
from holdfast.bucket.folder import CheckpointFolder
from holdfast.errors import (
    AlreadyExistsError,
    DigestMismatchError,
    InvalidRequestError,
    ManifestError,
    NotFoundError,
    NotReadyError,
    TruncatedShardError,
)
from holdfast.format.digest import PART_BYTES
from holdfast.format.segment import header_length
from holdfast.objectstore.directory import DirectoryStore


def trained(seed: int, *, width: int = 3) -> dict[str, object]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(seed):
        model(torch.randn(5, width)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "extra": {"tokens": seed, "odd": torch.arange(6).reshape(2, 3).t()},
    }


def tensors(state):
    yield from state["model"].state_dict().values()
    for held in state["optimizer"].state_dict()["state"].values():
        yield from held.values()
    yield state["extra"]["odd"]


def assert_equal(one, other):
    found, expected = list(tensors(one)), list(tensors(other))
    assert len(expected) == len(found)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    assert one["scheduler"].state_dict() == other["scheduler"].state_dict()
    assert one["extra"]["tokens"] == other["extra"]["tokens"]


@pytest.fixture
def place(tmp_path):
    return tmp_path / "runs" / "gpt" / "final"


def test_what_was_saved_is_loaded_in_place_bit_for_bit(place):
    saved, target = trained(3), trained(1)
    weight = target["model"][0].weight
    holdfast.save(place, saved, notes={"loss": 0.5})
    found = holdfast.load(place, target)

    assert_equal(target, saved)
    assert weight is target["model"][0].weight
    assert {"loss": 0.5} == found.notes
    assert (1, (), ()) == (found.world_size, found.missing, found.unexpected)


def test_the_folder_is_a_checkpoint_of_the_bucket_layout(place):
    holdfast.save(str(place), trained(2))

    assert ["manifest.json", "shard-00000-of-00001.safetensors", "shard-00000-of-00001.sum"] == (
        sorted(path.name for path in place.iterdir() if not path.name.startswith("."))
    )
    manifest = CheckpointFolder(DirectoryStore(place)).manifest()
    assert ("one-shot", 1, 0) == (manifest.job, manifest.world_size, manifest.checkpoint.step)


class Blocks(nn.Module):
    """More than two windows of parameters, of every kind of layout."""

    def __init__(self, value: float) -> None:
        super().__init__()
        big = torch.full((9 * PART_BYTES // 2 + 3,), value, dtype=torch.bfloat16)
        big[::1000] = torch.arange(len(big[::1000])) % 251
        self.big = nn.Parameter(big)
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t() + value)
        self.register_buffer("flags", torch.arange(7) % 3 == value % 3)
        self.register_buffer("wave", torch.polar(torch.ones(5), torch.arange(5.0)) * value)
        self.register_buffer("conj", self.wave.conj())
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(value))


def test_tensors_longer_than_a_window_and_odd_ones_are_streamed(place):
    saved, target = Blocks(2.0), Blocks(1.0)
    holdfast.save(place, {"model": saved})
    holdfast.load(place, {"model": target})

    assert (place / "shard-00000-of-00001.safetensors").stat().st_size > 8 * PART_BYTES
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name
    assert not target.turned.is_contiguous()


def test_a_checkpoint_is_not_replaced_unless_asked(place):
    first, second, target = trained(2), trained(4), trained(1)
    holdfast.save(place, first)
    with pytest.raises(AlreadyExistsError, match="already: choose another path, or overwrite=True"):
        holdfast.save(place, second)
    holdfast.load(place, target)

    assert_equal(target, first)

    holdfast.save(place, second, overwrite=True)
    holdfast.load(place, target)

    assert_equal(target, second)


def test_leftovers_of_another_world_are_gone_after_a_save(place):
    """P7: a plain reader believes whatever the folder lists."""
    place.mkdir(parents=True)
    for name in ("shard-00001-of-00002.safetensors", "shard-00001-of-00002.sum", "shard-x.sum"):
        (place / name).write_bytes(b"x")
    holdfast.save(place, trained(1))

    assert not list(place.glob("shard-00001*"))
    assert (place / "shard-x.sum").exists()


def test_random_streams_come_back_only_when_asked(place):
    state = trained(1)
    torch.manual_seed(7)
    random.seed(7)
    holdfast.save(place, state)
    expected = (torch.rand(3), random.random())
    torch.manual_seed(8)
    later = torch.get_rng_state()
    holdfast.load(place, state)

    assert torch.equal(later, torch.get_rng_state())

    holdfast.load(place, state, rng=True)

    assert torch.equal(expected[0], torch.rand(3))
    assert expected[1] == random.random()


def test_only_the_model_is_loaded_when_only_that_is_asked_for(place):
    saved, target = trained(3), trained(1)
    before = [t.clone() for t in target["optimizer"].state_dict()["state"][0].values()]
    holdfast.save(place, saved)
    found = holdfast.load(place, target, only={"model"})

    assert torch.equal(saved["model"][0].weight, target["model"][0].weight)
    assert 1 == target["extra"]["tokens"]
    after = list(target["optimizer"].state_dict()["state"][0].values())
    assert all(map(torch.equal, before, after))
    assert ((), ()) == (found.missing, found.unexpected)


def test_a_model_alone_is_loaded_from_a_whole_checkpoint_by_only(place):
    saved, target = trained(3), {"model": trained(1)["model"]}
    holdfast.save(place, saved)
    holdfast.load(place, target, only=["model"])

    assert torch.equal(saved["model"][0].weight, target["model"][0].weight)
    assert ["model"] == list(target)


def test_strict_refuses_what_is_only_here_or_only_there(place):
    saved = trained(2)
    holdfast.save(place, saved)
    with pytest.raises(InvalidRequestError, match="states 'optimizer', 'scheduler' exist only in"):
        holdfast.load(place, {"model": trained(1)["model"]})
    with pytest.raises(InvalidRequestError, match="'other' exists only in the script"):
        holdfast.load(place, {**trained(1), "other": nn.Linear(2, 2)})
    bigger = nn.Sequential(*saved["model"], nn.Linear(2, 2))
    with pytest.raises(
        NotReadyError,
        match=r"tensors 'model\.3\.weight', 'model\.3\.bias' exist only in the script",
    ):
        holdfast.load(place, {"model": bigger}, only={"model"})


def test_not_strict_loads_what_matches_and_names_the_rest(place):
    saved = trained(2)
    holdfast.save(place, {**saved, "nested": {"ema": nn.Linear(1, 1), "n": 3}})
    model = nn.Sequential(*trained(1)["model"][:2], nn.Identity(), nn.Linear(1, 1))
    target = {"model": model, "fresh": 5, "nested": {"n": 0}, "extra": {}}
    found = holdfast.load(place, target, strict=False)

    assert torch.equal(saved["model"][0].weight, model[0].weight)
    assert {"model.3.weight", "model.3.bias", "fresh"} == set(found.missing)
    assert {"model.2.weight", "model.2.bias", "optimizer", "scheduler", "nested.ema"} == set(
        found.unexpected
    )
    assert 5 == target["fresh"]
    assert {"n": 3} == target["nested"]
    assert 2 == target["extra"]["tokens"]


def test_another_shape_is_refused_before_anything_is_written(place):
    holdfast.save(place, trained(2))
    target = trained(1, width=5)
    before = target["model"][0].bias.clone()
    with pytest.raises(InvalidRequestError, match=r"'model\.0\.weight' is \(4, 5\)"):
        holdfast.load(place, target, strict=False)

    assert torch.equal(before, target["model"][0].bias)


SEGMENT = "shard-00000-of-00001.safetensors"
SIDECAR = "shard-00000-of-00001.sum"


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [-1, header_length], ids=["last", "first"])
def test_a_changed_byte_names_shard_and_part(place, at):
    """P3: the last byte of the padding, and the first one of a tensor."""
    holdfast.save(place, trained(2))
    flip(place / SEGMENT, at if at == -1 else at((place / SEGMENT).read_bytes()))
    with pytest.raises(DigestMismatchError, match=f"part 0 of {SEGMENT}") as caught:
        holdfast.load(place, trained(1))

    assert "0" == caught.value.context["part"]
    assert caught.value.context["shard"].endswith("/0/0/0/0")


def test_a_header_that_lies_and_breaks_no_rule_is_found_by_its_digest(place):
    holdfast.save(place, trained(2))
    data = (place / SEGMENT).read_bytes()
    swapped = data.replace(b'"model.0.bias"', b'"model.0.xias"').replace(
        b'\\"model.0.bias\\"', b'\\"model.0.xias\\"'
    )
    (place / SEGMENT).write_bytes(swapped)
    target = trained(1)
    before = target["model"][2].weight.clone()
    with pytest.raises(DigestMismatchError, match="part 0 of"):
        holdfast.load(place, target, strict=False)

    assert data != swapped
    assert torch.equal(before, target["model"][2].weight)


def test_a_changed_manifest_or_sidecar_is_refused(place):
    holdfast.save(place, trained(2))
    flip(place / "manifest.json", 40)
    with pytest.raises(ManifestError):
        holdfast.load(place, trained(1))
    holdfast.save(place, trained(2), overwrite=True)
    flip(place / SIDECAR, -80)
    with pytest.raises(ManifestError):
        holdfast.load(place, trained(1))


@pytest.mark.parametrize("name", ["manifest.json", SEGMENT, SIDECAR])
def test_what_is_missing_is_named(place, name):
    holdfast.save(place, trained(2))
    (place / name).unlink()
    with pytest.raises(NotFoundError, match=name.replace(".", r"\.")):
        holdfast.load(place, trained(1))


def test_a_cut_segment_is_truncated(place):
    holdfast.save(place, trained(2))
    data = (place / SEGMENT).read_bytes()
    (place / SEGMENT).write_bytes(data[:-1])
    with pytest.raises(TruncatedShardError):
        holdfast.load(place, trained(1))


def test_nothing_there_is_not_found(place):
    with pytest.raises(NotFoundError):
        holdfast.load(place, trained(1))


def test_what_cannot_be_saved_is_named_and_leaves_nothing(place):
    with pytest.raises(InvalidRequestError, match=r"'extra\.f' holds a builtins\.function"):
        holdfast.save(place, {"extra": {"f": test_nothing_there_is_not_found}})
    with pytest.raises(InvalidRequestError, match="notes are not"):
        holdfast.save(place, {"a": 1}, notes={"x": float("nan")})
    with pytest.raises(InvalidRequestError, match="pass a dict"):
        holdfast.save(place, [1])

    assert not list(place.glob("manifest.json")) + list(place.glob("shard-*"))


def test_several_ranks_without_a_process_group_are_refused(place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(holdfast.errors.PreconditionError, match="after init_process_group"):
        holdfast.save(place, {"a": 1})


def test_a_state_dict_in_the_place_of_an_object_is_named_both_ways(place):
    """Who knows torch.save gives its state_dict(); ``strict=False`` would load nothing of it."""
    model = torch.nn.Linear(2, 2)
    holdfast.save(place / "object", {"model": model})
    holdfast.save(place / "plain", {"model": model.state_dict()})

    with pytest.raises(InvalidRequestError, match=r"put the object into the state, not its state"):
        holdfast.load(place / "object", {"model": model.state_dict()})
    with pytest.raises(InvalidRequestError, match=r"'model' is a Linear now .* as plain data"):
        holdfast.load(place / "plain", {"model": model})


@pytest.mark.parametrize(("at", "said"), [("", "no checkpoint folder is at"), ("x", "is missing")])
def test_a_path_without_a_checkpoint_is_named(tmp_path, at, said):
    with pytest.raises(NotFoundError, match=said) as found:
        holdfast.load(tmp_path / at, {})

    assert said in str(found.value)
    assert str(tmp_path / at) in str(found.value)


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    """As who has files of torch.save gives them; a retry would find the same file."""
    file = tmp_path / "model.pt"
    file.write_bytes(b"any")

    with pytest.raises(InvalidRequestError, match=r"model\.pt is no folder: choose another path"):
        holdfast.save(file, {"n": 1})
    with pytest.raises(NotFoundError, match=r"model\.pt is a file"):
        holdfast.load(file, {"n": 1})

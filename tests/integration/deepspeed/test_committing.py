"""The ranks of a save tell each other by objects in a folder; each is played here in turn."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.core.ids import RunId
from holdfast.errors import CheckpointError, InvalidRequestError, NotFoundError, UnavailableError
from holdfast.format.boxes import Box
from holdfast.format.segment import TensorSpec
from holdfast.integrations.deepspeed.committing import Part, Save, commit
from holdfast.integrations.deepspeed.host_copies import HostCopies
from holdfast.oneshot.world import World


def save(tmp_path, number=0):
    return Save(
        RunId("a" * 24 + f"{number:08x}"), str(tmp_path), "step", latest=True, markers=("x.pt",)
    )


def part():
    spec = TensorSpec(fqn="w", dtype="F32", shape=(2, 3), box=Box((1,), (5,)))
    zero = TensorSpec(fqn="w0", dtype="F32", shape=(1,), box=Box((0,), (1,)))
    return Part([spec, zero], [torch.arange(5.0), torch.ones(1)], {"tree": {"w": {"$ref": "w0"}}})


def broken():
    raise InvalidRequestError("no such value")


def test_a_rank_that_comes_late_hears_that_the_save_was_given_up(tmp_path):
    with pytest.raises(InvalidRequestError, match="no such value"):
        commit(save(tmp_path), World(0, 2), broken)

    with pytest.raises(UnavailableError, match="given the save up"):
        commit(save(tmp_path), World(1, 2), part)


def test_it_hears_of_it_though_the_next_save_has_begun_in_the_same_folder(tmp_path):
    with pytest.raises(InvalidRequestError, match="no such value"):
        commit(save(tmp_path), World(0, 2), broken)
    commit(save(tmp_path, 1), World(0, 1), part)

    with pytest.raises(UnavailableError, match="given the save up"):
        commit(save(tmp_path), World(1, 2), part)


def test_a_failed_save_leaves_the_checkpoint_and_latest_as_they_were(tmp_path):
    commit(save(tmp_path), World(0, 1), part)
    with pytest.raises(InvalidRequestError, match="no such value"):
        commit(save(tmp_path, 1), World(0, 1), broken)

    state = {}
    holdfast.load(Path(tmp_path, "step"), state)

    assert torch.equal(torch.ones(1), state["tree"]["w"])
    assert "step" == Path(tmp_path, "latest").read_text()
    assert b"" == Path(tmp_path, "step", "x.pt").read_bytes()


def test_a_pickle_that_deepspeed_left_in_the_folder_does_not_outlive_a_save(tmp_path):
    """Whoever reads it without Holdfast would go on from weights that are not of this save."""
    Path(tmp_path, "step").mkdir()
    Path(tmp_path, "step", "x.pt").write_bytes(b"weights of yesterday")

    commit(save(tmp_path), World(0, 1), part)

    assert b"" == Path(tmp_path, "step", "x.pt").read_bytes()


def test_all_ranks_hear_that_rank_0_cannot_write_latest(tmp_path):
    Path(tmp_path, "latest").mkdir()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(commit, save(tmp_path), World(1, 2), part)
        with pytest.raises(IsADirectoryError):
            commit(save(tmp_path), World(0, 2), part)

        with pytest.raises(UnavailableError, match="given the save up"):
            other.result()


def test_all_ranks_hear_that_rank_0_cannot_begin(tmp_path):
    Path(tmp_path, "step", f"deepspeed-save-{save(tmp_path).run}.json", "taken").mkdir(parents=True)
    with pytest.raises((CheckpointError, OSError)):
        commit(save(tmp_path), World(0, 2), part)

    with pytest.raises(UnavailableError, match="given the save up"):
        commit(save(tmp_path), World(1, 2), part)


def test_without_a_manifest_there_is_no_checkpoint_and_no_latest(tmp_path):
    with pytest.raises(InvalidRequestError, match="no such value"):
        commit(save(tmp_path), World(0, 1), broken)

    with pytest.raises(NotFoundError):
        holdfast.load(Path(tmp_path, "step"), {})

    assert not Path(tmp_path, "latest").exists()


def test_copies_use_their_memory_again_and_lie_as_the_tensors_do():
    flat = torch.arange(100.0)
    tensors = [flat[:40].view(8, 5), flat[40:70], flat.view(10, 10).T, torch.tensor(3), flat[:0]]
    copies = HostCopies()

    first, *_ = copies.take(tensors)
    flat += 1
    places = [copy.data_ptr() for copy in first]
    second, now, later = copies.take(tensors, {0, 1, 2, 4})
    for copy, tensor in (*now, *later):
        copy.copy_(tensor)

    assert places == [copy.data_ptr() for copy in second]
    assert [2, 1] == [len(now), len(later)]
    assert all(torch.equal(*pair) for pair in zip(tensors, second, strict=True))

"""What a killed save leaves beside a tag's folder, and what the next save or load makes of it."""

import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import InvalidRequestError
from holdfast.format.boxes import whole
from holdfast.format.segment import TensorSpec
from holdfast.integrations.deepspeed import placing
from holdfast.integrations.deepspeed.committing import Part, Save, commit, run_of
from holdfast.oneshot.world import World

KILLED = "b" * 32


def save(folder, number, value, tag="step"):
    """Save with one rank; with no value it fails before anything is sent."""

    def part():
        if value is None:
            raise InvalidRequestError("no such value")
        spec = TensorSpec(fqn="w", dtype="F32", shape=(1,), box=whole((1,)))
        return Part([spec], [torch.tensor([value])], {"tree": {"w": {"$ref": "w"}}})

    of = Save(run_of("a" * 24, number), str(folder), tag, latest=True)
    commit(of, World(0, 1), None, part)


def loaded(folder):
    state = {}
    holdfast.load(folder, state)
    return float(state["tree"]["w"])


def fails(folder, number, tag="step"):
    with pytest.raises(InvalidRequestError, match="no such value"):
        save(folder, number, None, tag)


@pytest.mark.parametrize("tag", ["t" * 255, "ä" * 127], ids=["ascii", "two bytes each"])
def test_a_tag_may_be_as_long_as_the_name_of_a_folder(tmp_path, tag):
    """What lies beside while it is saved again has a short name, and is known as this tag's."""
    save(tmp_path, 1, 1.0, tag)
    placing.beside(tmp_path / tag, KILLED).mkdir()
    save(tmp_path, 2, 2.0, tag)

    assert 2.0 == loaded(tmp_path / tag)
    assert {tag, "latest"} == {path.name for path in tmp_path.iterdir()}


def test_what_is_left_of_one_tag_is_nothing_to_another(tmp_path):
    """Another job may be saving it."""
    save(tmp_path, 1, 1.0, "a")
    left = placing.beside(tmp_path / "a", KILLED)
    left.mkdir()
    for number in (2, 3):
        save(tmp_path, number, 2.0, "a.a")
    placing.recover(tmp_path / "aa")

    assert left.is_dir()


def test_the_place_of_a_checkpoint_is_not_taken_by_what_it_has_replaced(tmp_path):
    """A save was killed right after the exchange, and the next one fails."""
    save(tmp_path, 1, 1.0, "before")
    save(tmp_path, 2, 2.0)
    Path(tmp_path, "before").rename(placing.beside(tmp_path / "step", KILLED))

    fails(tmp_path, 3)

    assert 2.0 == loaded(tmp_path / "step")
    assert {"step", "latest"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize("is_link", [False, True], ids=["file", "link to nothing"])
def test_a_file_of_the_script_is_not_replaced_by_an_older_one(tmp_path, is_link, has_checkpoint):
    """The save was killed after the exchange; the script has written its own again since then."""
    left, now = placing.beside(tmp_path / "step", KILLED), tmp_path / "step" / "rng.bin"
    if has_checkpoint:
        save(tmp_path, 1, 1.0)
    else:
        now.parent.mkdir()
    left.mkdir()
    Path(left, "rng.bin").write_bytes(b"older")
    if is_link:
        now.symlink_to("not yet written")
    else:
        now.write_bytes(b"newer")

    save(tmp_path, 2, 2.0)

    assert now.is_symlink() if is_link else b"newer" == now.read_bytes()
    assert {"step", "latest"} == {path.name for path in tmp_path.iterdir()}


def test_a_file_of_the_script_that_lay_beside_nothing_has_its_place_again(tmp_path):
    left = placing.beside(tmp_path / "step", KILLED)
    left.mkdir()
    Path(left, "rng.bin").write_bytes(b"of the script")

    save(tmp_path, 1, 1.0)

    assert b"of the script" == Path(tmp_path, "step", "rng.bin").read_bytes()
    assert {"step", "latest"} == {path.name for path in tmp_path.iterdir()}


def test_after_a_kill_between_two_renames_the_new_one_counts_not_the_old(tmp_path):
    """For the next load, and for a save that comes without one. Folders list in their own order."""
    for number, tag in enumerate("abcdefghijklmnop"):
        folder = tmp_path / tag
        new = placing.beside(folder, KILLED)
        save(tmp_path, 1, 1.0, new.with_suffix(".old").name)
        save(tmp_path, 2, 2.0, new.name)
        if number % 2:
            placing.recover(folder)
        else:
            fails(tmp_path, 3, tag)

        assert 2.0 == loaded(folder)


@pytest.mark.parametrize("can", [True, False], ids=["exchange", "two renames"])
def test_nor_is_a_folder_in_the_way_that_was_made_again_since_then(tmp_path, monkeypatch, can):
    """DeepSpeed makes it for each save, and a script may have put its own there."""
    if not can:
        monkeypatch.setattr(placing, "exchange", lambda *_: False)
    new = placing.beside(tmp_path / "step", KILLED)
    save(tmp_path, 1, 1.0, new.with_suffix(".old").name)
    save(tmp_path, 2, 2.0, new.name)
    Path(tmp_path, "step").mkdir()
    Path(tmp_path, "step", "rng.bin").write_bytes(b"of the script")

    fails(tmp_path, 3)
    assert 2.0 == loaded(tmp_path / "step")
    save(tmp_path, 4, 4.0)

    assert 4.0 == loaded(tmp_path / "step")
    assert b"of the script" == Path(tmp_path, "step", "rng.bin").read_bytes()
    assert {"step", "latest"} == {path.name for path in tmp_path.iterdir()}


def test_a_save_does_not_fail_of_a_load_that_comes_between_its_two_renames(tmp_path, monkeypatch):
    """Such as that of an evaluation: what it takes for left over is of a save under way."""
    monkeypatch.setattr(placing, "exchange", lambda *_: False)
    rename, folder = Path.rename, tmp_path / "step"

    def rename_and_load(path, to):
        rename(path, to)
        if path == folder:
            placing.recover(folder)

    save(tmp_path, 1, 1.0)
    monkeypatch.setattr(Path, "rename", rename_and_load)
    save(tmp_path, 2, 2.0)

    assert 2.0 == loaded(folder)
    assert {"step", "latest"} == {path.name for path in tmp_path.iterdir()}


def test_a_save_fails_whose_bytes_are_gone_before_they_are_in_place(tmp_path, monkeypatch):
    """``latest`` would name a folder that is not there; the checkpoint before is put back."""
    monkeypatch.setattr(placing, "exchange", lambda *_: False)
    rename, folder = Path.rename, tmp_path / "step"

    def rename_and_remove(path, to):
        rename(path, to)
        if path == folder:
            shutil.rmtree(placing.beside(folder, run_of("a" * 24, 2)))

    save(tmp_path, 1, 1.0)
    with monkeypatch.context() as removed:
        removed.setattr(Path, "rename", rename_and_remove)
        with pytest.raises(FileNotFoundError):
            save(tmp_path, 2, 2.0)
    placing.recover(folder)

    assert 1.0 == loaded(folder)


def test_a_rank_that_is_not_the_first_to_put_a_checkpoint_back_goes_on(tmp_path, monkeypatch):
    """All load at once, and each has seen what was left beside."""
    save(tmp_path, 1, 1.0, "new")
    folder, rename = tmp_path / "step", Path.rename
    Path(tmp_path, "new").rename(placing.beside(folder, KILLED))

    with monkeypatch.context() as quicker:
        quicker.setattr(Path, "rename", lambda path, to: (rename(path, to), rename(path, to)))
        placing.recover(folder)

    assert 1.0 == loaded(folder)


def test_what_is_not_whole_does_not_take_the_place_of_a_checkpoint_that_is(tmp_path):
    """Such as what could not all be removed of a save that was killed before."""
    save(tmp_path, 1, 1.0, "new")
    folder = tmp_path / "step"
    Path(tmp_path, "new").rename(placing.beside(folder, KILLED))
    for number in range(8):  # in whatever order they are listed
        torn = placing.beside(folder, f"{number:032x}")
        torn.mkdir()
        Path(torn, "a file").touch()

    placing.recover(folder)

    assert 1.0 == loaded(folder)

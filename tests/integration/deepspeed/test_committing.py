"""The ranks of a save leave each other a word; each is played here in turn, or by a thread."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.core.ids import RunId
from holdfast.errors import (
    CheckpointError,
    ConflictError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from holdfast.format.boxes import Box
from holdfast.format.segment import TensorSpec
from holdfast.integrations.deepspeed import committing, placing
from holdfast.integrations.deepspeed.background import Background
from holdfast.integrations.deepspeed.board import Board
from holdfast.integrations.deepspeed.committing import Part, Save, commit
from holdfast.integrations.deepspeed.host_copies import HostCopies
from holdfast.oneshot.world import World

MARKER = "mp_rank_00_model_states.pt"


@pytest.fixture
def words():
    return dist.HashStore()


def save(tmp_path, number=1, tag="step"):
    return Save(
        RunId("a" * 24 + f"{number:08x}"), str(tmp_path), tag, latest=True, markers=(MARKER,)
    )


def part(value=1.0, alike=()):
    spec = TensorSpec(fqn="w", dtype="F32", shape=(2, 3), box=Box((1,), (5,)))
    zero = TensorSpec(fqn="w0", dtype="F32", shape=(1,), box=Box((0,), (1,)))
    tensors = [torch.arange(5.0), torch.full((1,), value)]
    return lambda: Part([spec, zero], tensors, {"tree": {"w": {"$ref": "w0"}}}, dict(alike))


def broken():
    raise InvalidRequestError("no such value")


def loaded(folder):
    state = {}
    holdfast.load(folder, state)
    return float(state["tree"]["w"])


def test_a_rank_that_comes_late_hears_why_the_save_was_given_up(tmp_path, words):
    with pytest.raises(InvalidRequestError, match="no such value"):
        commit(save(tmp_path), World(0, 2), words, broken)

    with pytest.raises(UnavailableError, match=r"rank 0 failed: .*no such value"):
        commit(save(tmp_path), World(1, 2), words, part())


def test_it_hears_of_it_though_the_next_save_has_begun_in_the_same_folder(tmp_path, words):
    with pytest.raises(InvalidRequestError, match="no such value"):
        commit(save(tmp_path, 1), World(0, 2), words, broken)
    commit(save(tmp_path, 2), World(0, 1), words, part())

    with pytest.raises(UnavailableError, match="no such value"):
        commit(save(tmp_path, 1), World(1, 2), words, part())


def test_what_was_said_of_a_save_is_forgotten_by_the_save_after_the_next(tmp_path, words):
    """Each rank takes back its own; the store does not grow with the saves."""
    counts = []
    for number in range(1, 6):
        both(tmp_path, words, part(), part(), number)
        counts.append(words.num_keys())

    assert [3, 6, 6, 6, 6] == counts


def both(tmp_path, words, one, other, number=1, tag="step"):
    """Save with two ranks, and return what rank 1 has raised, None if nothing."""
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(commit, save(tmp_path, number, tag), World(1, 2), words, other)
        try:
            commit(save(tmp_path, number, tag), World(0, 2), words, one)
        finally:
            failure = second.exception()
    return failure


def test_a_failed_save_leaves_the_checkpoint_and_latest_as_they_were(tmp_path):
    commit(save(tmp_path, 1), World(0, 1), None, part())
    with pytest.raises(InvalidRequestError, match="no such value"):
        commit(save(tmp_path, 2), World(0, 1), None, broken)

    assert 1.0 == loaded(tmp_path / "step")
    assert "step" == Path(tmp_path, "latest").read_text()
    assert b"" == Path(tmp_path, "step", MARKER).read_bytes()
    assert {"step", "latest"} == {path.name for path in tmp_path.iterdir()}


def test_a_pickle_that_deepspeed_left_in_the_folder_does_not_outlive_a_save(tmp_path):
    """Whoever reads it without Holdfast would go on from weights that are not of this save."""
    Path(tmp_path, "step").mkdir()
    Path(tmp_path, "step", MARKER).write_bytes(b"weights of yesterday")

    commit(save(tmp_path), World(0, 1), None, part())

    assert b"" == Path(tmp_path, "step", MARKER).read_bytes()


def test_all_ranks_hear_that_rank_0_cannot_write_latest(tmp_path, words):
    Path(tmp_path, "latest").mkdir()
    with pytest.raises(IsADirectoryError):
        both(tmp_path, words, part(), part())

    with pytest.raises(UnavailableError, match="rank 0 failed: IsADirectoryError"):
        commit(save(tmp_path), World(1, 2), words, part())


def test_all_ranks_hear_at_once_that_rank_0_cannot_write_into_the_folder(tmp_path, words):
    """Nothing can be said in a folder that cannot be written; they wait half an hour otherwise."""
    Path(tmp_path, "step").write_bytes(b"no folder")
    with pytest.raises((CheckpointError, OSError)):
        commit(save(tmp_path), World(0, 2), words, part())

    with pytest.raises(UnavailableError, match=r"rank 0 failed: .*step"):
        commit(save(tmp_path), World(1, 2), words, part())


def test_all_ranks_hear_at_once_that_another_cannot_write(tmp_path, words):
    def full():
        raise ExhaustedError("no space")

    with pytest.raises(UnavailableError, match=r"rank 1 failed: .*no space"):
        both(tmp_path, words, part(), full)


def test_a_rank_looks_into_the_folder_where_the_store_of_words_has_ended(tmp_path, words):
    """Rank 0 has it, and may end as soon as its save is over."""

    class Ended:
        def __getattr__(self, name):
            raise dist.DistNetworkError("connection reset")

    with pytest.raises(OutcomeUnknownError, match="store does not answer"):
        commit(save(tmp_path), World(1, 2), Ended(), part())

    class EndsWithTheSave:
        def __getattr__(self, name):
            there = Path(tmp_path, "step/manifest.json").exists()
            return getattr(Ended() if there else words, name)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(commit, save(tmp_path), World(1, 2), EndsWithTheSave(), part())
        commit(save(tmp_path), World(0, 2), words, part())

        assert other.result() is None


SERVES_WORDS = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_rank_hears_at_once_that_the_process_which_has_the_words_was_killed(tmp_path):
    """That is rank 0 or the launcher; in the middle of a save, when rank 0 has begun it."""
    with subprocess.Popen([sys.executable, "-c", SERVES_WORDS], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as server:  # fmt: skip
        words = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        Board(words, save(tmp_path).run).tell("begun", {"beside": False})

        def dies():
            server.kill()
            server.wait()
            return part()()

        with pytest.raises(OutcomeUnknownError, match="rank 0 or the launcher has ended"):
            commit(save(tmp_path), World(1, 2), words, dies)


@pytest.mark.parametrize("can", [True, False], ids=["exchange", "two renames"])
def test_a_tag_that_is_saved_again_keeps_its_checkpoint_until_the_new_one_is_whole(
    tmp_path, words, monkeypatch, can
):
    """What else lies in its folder stays there, and the folder's mode stays what it was."""
    if not can:
        monkeypatch.setattr(placing, "exchange", lambda *_: False)
    both(tmp_path, words, part(1.0), part(), 1)
    Path(tmp_path, "step").chmod(0o750)
    Path(tmp_path, "step", "rng.bin").write_bytes(b"of the script")
    Path(tmp_path, "step", "zero_pp_rank_5_mp_rank_00_optim_states.pt").touch()
    during = []
    later = part(2.0)
    both(tmp_path, words, lambda: (during.append(loaded(tmp_path / "step")), later())[1], later, 2)

    assert [1.0] == during
    assert 2.0 == loaded(tmp_path / "step")
    assert b"of the script" == Path(tmp_path, "step", "rng.bin").read_bytes()
    assert 0o750 == Path(tmp_path, "step").stat().st_mode & 0o777
    assert not list(tmp_path.glob("step/*_optim_states.pt"))
    assert {"step", "latest"} == {path.name for path in tmp_path.iterdir()}


def no_space():
    raise OSError("no space")


def test_a_save_is_whole_though_a_file_of_the_script_cannot_be_moved(tmp_path, monkeypatch):
    """Such as another user's folder: it is kept beside, until it can be."""
    commit(save(tmp_path, 1), World(0, 1), None, part(1.0))
    Path(tmp_path, "step", "rng.bin").write_bytes(b"of the script")
    rename = Path.rename
    with monkeypatch.context() as refused:
        refused.setattr(
            Path, "rename", lambda p, to: no_space() if p.name == "rng.bin" else rename(p, to)
        )
        commit(save(tmp_path, 2), World(0, 1), None, part(2.0))

    assert 2.0 == loaded(tmp_path / "step")
    commit(save(tmp_path, 3), World(0, 1), None, part(3.0))
    assert b"of the script" == Path(tmp_path, "step", "rng.bin").read_bytes()
    assert {"step", "latest"} == {path.name for path in tmp_path.iterdir()}


def test_a_tag_that_is_a_link_stays_one_and_its_folder_is_written(tmp_path):
    """A link may lead to another disk, where there is room for checkpoints."""
    target = tmp_path / "disk" / "real"
    target.mkdir(parents=True)
    Path(tmp_path, "step").symlink_to(target)
    for number in (1, 2):
        commit(save(tmp_path, number), World(0, 1), None, part(float(number)))

    assert Path(tmp_path, "step").readlink() == target
    assert 2.0 == loaded(target)
    assert ["real"] == [path.name for path in target.parent.iterdir()]
    assert {"step", "latest", "disk"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("tag", [".", "..", "", "other/.."])
def test_a_tag_whose_folder_has_other_checkpoints_in_it_is_refused(tmp_path, words, tag):
    """They would be exchanged with it."""
    with pytest.raises(InvalidRequestError, match="tag name a folder of its own"):
        commit(save(tmp_path / "saves", 1, tag), World(0, 1), words, part())
    with pytest.raises(UnavailableError, match="tag name a folder of its own"):
        commit(save(tmp_path / "saves", 1, tag), World(1, 2), words, part())


@pytest.mark.parametrize(
    "tag", ["a b", "a%20#?*", "[a]", ".a", "a.new", "ä", "a\nb", "x/y", "s3:a"]
)
def test_tags_may_have_characters_that_mean_something_elsewhere(tmp_path, tag):
    for number in (1, 2):
        commit(save(tmp_path, number, tag), World(0, 1), None, part(float(number)))
    placing.beside(tmp_path / tag, "b" * 32).mkdir()  # of a killed save
    commit(save(tmp_path, 3, tag), World(0, 1), None, part(3.0))

    assert 3.0 == loaded(tmp_path / tag)
    assert {tmp_path / tag} == {*Path(tmp_path, tag).parent.iterdir()} - {tmp_path / "latest"}


def test_a_save_that_fails_over_another_leaves_nothing_beside_it(tmp_path, words):
    both(tmp_path, words, part(1.0), part(), 1)
    with pytest.raises(UnavailableError, match=r"rank 1 failed: .*no such value"):
        both(tmp_path, words, part(2.0), broken, 2)

    assert 1.0 == loaded(tmp_path / "step")
    assert {"step", "latest"} == {path.name for path in tmp_path.iterdir()}


def test_ranks_that_differ_in_what_is_saved_once_for_all_are_told_by_name(tmp_path, words):
    """Otherwise a restore would give all ranks the value of rank 0."""
    with pytest.raises(InvalidRequestError, match=r"differ in 'groups.d', 'one', 'other'"):
        both(tmp_path, words, part(alike={"groups.d": "1", "same": "3", "one": "4"}),
             part(alike={"groups.d": "2", "same": "3", "other": "4"}))  # fmt: skip

    assert not Path(tmp_path, "latest").exists()


@pytest.mark.parametrize(
    ("number", "rank", "size"), [(5, 1, 3), (1, 2, 3), (1, 1, 4)],
    ids=["another save", "another rank", "another world"],
)  # fmt: skip
def test_what_a_rank_tells_of_is_not_taken_for_its_part_of_this_save(
    tmp_path, words, number, rank, size
):
    """Words come from the network. It is said of whom, before others are waited for in vain."""
    told = Board(words, save(tmp_path, number).run)
    told.tell("begun", {"beside": False})
    told.tell("over", {})
    heard = Board(words, save(tmp_path).run)
    heard.tell("2", {"error": "it is not asked for"})

    def other_is_sent():
        commit(save(tmp_path, number), World(rank, size), words, part())
        heard.tell("1", told.told(str(rank)))
        return part()()

    with pytest.raises(ConflictError, match="rank 1 tells of another save"):
        commit(save(tmp_path), World(0, 3), words, other_is_sent)


def test_an_upload_of_another_save_is_not_taken_for_what_a_rank_has_sent(tmp_path, words):
    """It may have the same name, where two jobs save into one folder."""
    board = Board(words, save(tmp_path).run)

    def other_has_sent():
        board.tell("over", {})
        commit(save(tmp_path), World(1, 2), words, part())
        board.forget(["over"])
        board.tell("1", {**board.told("1"), "upload": "0" * 32})
        return part()()

    with pytest.raises(ConflictError, match="what rank 1 has sent is not in"):
        commit(save(tmp_path), World(0, 2), words, other_has_sent)


def test_no_rank_hears_that_a_save_has_begun_before_the_folder_is_swept(
    tmp_path, words, monkeypatch
):
    """What it sends would be swept out with the rest."""
    seen, sweep, board = [], committing.sweep, Board(words, save(tmp_path).run)

    def heard_and_swept(store, **how):
        seen.append(board.told("begun"))
        sweep(store, **how)

    monkeypatch.setattr(committing, "sweep", heard_and_swept)
    commit(save(tmp_path), World(0, 1), words, part())

    assert [None] == seen
    assert {"beside": False} == board.told("begun")


class KilledError(BaseException):
    """The process has ended."""


@pytest.mark.parametrize(
    ("at", "dies", "tag"),
    [
        ("replace", "before", "again"), ("replace", "after", "again"),
        ("write_latest", "before", "again"), ("write_latest", "after", "again"),
        ("write_latest", "before", "new"), ("write_latest", "after", "new"),
        ("discard", "before", "again"),
    ],
)  # fmt: skip
def test_latest_names_a_tag_once_all_of_it_is_in_its_place(tmp_path, monkeypatch, at, dies, tag):
    """DeepSpeed's own files as well: what looks for them finds nothing of an older save."""
    commit(save(tmp_path, 1, "again"), World(0, 1), None, part(1.0))
    commit(save(tmp_path, 2, "other"), World(0, 1), None, part(2.0))
    step, new, marked = getattr(placing, at), tmp_path / tag, []

    def killed(*where):
        marked.append(Path(where[0] if at == "replace" else new, MARKER).exists())
        if dies == "after":
            step(*where)
        raise KilledError

    monkeypatch.setattr(placing, at, killed)
    with pytest.raises(KilledError):
        commit(save(tmp_path, 3, tag), World(0, 1), None, part(3.0))

    assert [True] == marked
    assert (1.0 if (at, dies) == ("replace", "before") else 3.0) == loaded(new)
    named = tag if at == "discard" or (at, dies) == ("write_latest", "after") else "other"
    assert named == Path(tmp_path, "latest").read_text()


def test_the_name_in_latest_is_on_disk_before_it_takes_the_place_of_the_one_before(
    tmp_path, monkeypatch
):
    """A kill, or a machine that fails, leaves one of both, never a part of a name."""
    seen, latest = [], tmp_path / "latest"
    latest.write_text("before")
    fsync = os.fsync
    monkeypatch.setattr(
        placing.os, "fsync", lambda fd: (seen.append(latest.read_text()), fsync(fd))
    )
    placing.write_latest(str(tmp_path), "after")

    assert ["before"] == seen
    assert "after" == latest.read_text()


def test_what_other_saves_leave_is_gone_before_one_needs_its_room_and_when_it_ends(tmp_path):
    """Of one that was killed before, and of one that goes on in the folder."""
    before, meanwhile = (
        tmp_path / "step" / f"shard-{rank:05}-of-00002.safetensors" for rank in range(2)
    )
    before.parent.mkdir()
    before.touch()
    seen, made = [], part()

    def other_goes_on():
        seen.append(before.exists())
        meanwhile.touch()
        return made()

    commit(save(tmp_path), World(0, 1), None, other_goes_on)

    assert [False] == seen
    assert not meanwhile.exists()


def test_a_save_whose_segment_another_one_removes_fails_and_is_no_checkpoint(tmp_path, monkeypatch):
    """What is in the folder is of the other one, or of nobody."""
    write = committing.write_manifest

    def written_and_removed(folder, shards, notes):
        write(folder, shards, notes)
        [segment] = Path(tmp_path, "step").glob("shard-*.safetensors")
        segment.unlink()

    monkeypatch.setattr(committing, "write_manifest", written_and_removed)
    with pytest.raises(ConflictError):
        commit(save(tmp_path), World(0, 1), None, part())

    assert not placing.is_whole(tmp_path / "step")


def test_without_a_manifest_there_is_no_checkpoint_and_no_latest(tmp_path):
    with pytest.raises(InvalidRequestError, match="no such value"):
        commit(save(tmp_path), World(0, 1), None, broken)

    with pytest.raises(NotFoundError):
        holdfast.load(Path(tmp_path, "step"), {})

    assert not Path(tmp_path, "latest").exists()


def test_what_waits_for_saves_at_the_end_of_the_process_does_not_grow_with_them():
    before = len(threading._threading_atexits)
    background, done = Background("test"), []
    for number in range(5):
        background.begin("a save", lambda number=number: done.append(number))
        background.settle(60)

    assert list(range(5)) == done
    assert before == len(threading._threading_atexits)


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

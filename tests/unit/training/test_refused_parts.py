"""What a guard refuses is kept as a file (ADR 0081), on real slots, threads and files."""

import contextlib
import errno
import os
import queue
import threading

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.training.savers import outcome, saver_of

from holdfast.core.session import SessionView
from holdfast.errors import NonFiniteError, PreconditionError
from holdfast.format.names import unranked
from holdfast.guards import RefuseNonFinite
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.training import kept_files, refused_parts
from holdfast.training.refused_parts import KEPT_COUNT_MAX, PIECE_BYTES, THREAD_NAME

NAN, INF = float("nan"), float("inf")
STATE_BYTES = 3 * PIECE_BYTES


def saved(folder, state, guard):
    with saver_of(folder, state, guard=guard) as saver:
        return outcome(saver, 2)


def told_by(saver):
    """Return the list of the events that ``saver`` posts from now on of what is not kept."""
    told, real = [], saver.session.post

    def post(**said):
        event = said.get("event")
        if event is not None and event.kind == "keep_failed":
            told.append(event.message)
        real(**said)

    saver.session.post = post
    return told


def kept(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))


def test_the_first_of_refusals_in_a_row_is_kept_as_a_file_that_others_open(tmp_path):
    """Bit for bit as it was in its slot, with what is finite beside it; a finite one ends a row."""
    state = {"w": torch.tensor([1.5, NAN]), "other": torch.arange(5)}
    folder = tmp_path / "kept"
    with saver_of(tmp_path, state, guard=RefuseNonFinite(keep=str(folder))) as saver:
        first = outcome(saver, 2)
        second = outcome(saver, 3, slot="s2")
        state["w"][1] = 2.0
        whole = outcome(saver, 4, slot="s3")
        state["w"][1] = INF
        third = outcome(saver, 5, slot="s4")

    assert [NonFiniteError, NonFiniteError, type(None), NonFiniteError] == [
        type(failure) for failure in (first, second, whole, third)
    ]
    names = [f"j/step-{step}-attempt-1-rank-0.safetensors" for step in (2, 5)]
    assert names == kept(folder)
    found = {unranked(key): tensor for key, tensor in load_file(folder / names[0]).items()}
    assert found["w"][0] == 1.5
    assert found["w"][1].isnan()
    assert torch.equal(found["other"], torch.arange(5))


def test_a_step_whose_loss_is_no_number_is_kept_with_its_finite_weights(tmp_path):
    """What it was computed with is what one looks for; the note of one step counts for that one."""
    folder = tmp_path / "kept"
    with saver_of(tmp_path, {"w": torch.ones(3)}, guard=RefuseNonFinite(keep=folder)) as saver:
        refused = outcome(saver, 2, {"loss": NAN})
        after = outcome(saver, 3, {"loss": 0.5}, slot="s2")

    assert refused.message == "step 2 is refused: NaN or infinity in notes['loss']"
    assert after is None
    assert ["j/step-2-attempt-1-rank-0.safetensors"] == kept(folder)


def test_a_note_counts_for_its_own_step_also_while_the_next_one_is_saved(tmp_path, monkeypatch):
    """The copy thread may still look at one step when training says what is wrong with the next."""
    guard = RefuseNonFinite(keep=tmp_path / "kept")
    with saver_of(tmp_path, {"w": torch.ones(3)}, guard=guard) as saver:
        leases = (saver.lease(slot="s1"), saver.lease(slot="s2"))
        saver.on_view(SessionView(version="2", leases=leases))
        check, said = saver._performer._finite, threading.Event()
        real = check.non_finite
        monkeypatch.setattr(check, "non_finite", lambda *a: said.wait(30) and real(*a))

        made = [saver.save(step, {"loss": NAN}) for step in (2, 3)]
        said.set()
        assert saver._performer.engine.wait(30)
        saver._performer.engine.close(30)

    assert [NonFiniteError] * 2 == [type(one._failure) for one in made]


def test_a_training_that_goes_on_with_nan_does_not_fill_the_disk(tmp_path):
    state, folder = {"w": torch.ones(1)}, tmp_path / "kept"
    with saver_of(tmp_path, state, guard=RefuseNonFinite(keep=folder)) as saver:
        for step in range(2, 2 * KEPT_COUNT_MAX + 6):
            state["w"][0] = NAN if step % 2 else 1.0
            outcome(saver, step, slot=f"s{step}")

    assert KEPT_COUNT_MAX == len(kept(folder))


@pytest.mark.parametrize("there", ["no folder", "the file", "no name"])
def test_what_cannot_be_kept_is_refused_all_the_same_and_nothing_is_replaced(
    tmp_path, caplog, there
):
    folder = tmp_path / ("kept\0" if there == "no name" else "kept")
    name = folder / "j" / "step-2-attempt-1-rank-0.safetensors"
    if there == "no folder":
        folder.write_text("a file")
    elif there == "the file":
        name.parent.mkdir(parents=True)
        name.write_text("another's")

    failure = saved(tmp_path, {"w": torch.tensor([NAN])}, RefuseNonFinite(keep=folder))

    assert isinstance(failure, NonFiniteError)
    assert "step 2, refused, is not kept" in caplog.text
    if there == "the file":
        assert [name.name] == [path.name for path in name.parent.iterdir()]
        assert "another's" == name.read_text()


def test_a_disk_that_is_full_in_the_middle_costs_the_file_and_leaves_nothing(tmp_path, monkeypatch):
    """What is there of it is of no use to anybody, and takes the room that others need."""
    pieces, real = [], kept_files._write_all

    def write_all(descriptor, piece):
        pieces.append(len(piece))
        if len(pieces) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, piece)

    monkeypatch.setattr(kept_files, "_write_all", write_all)
    folder, state = tmp_path / "kept", {"w": torch.full((STATE_BYTES // 4,), NAN)}
    with saver_of(tmp_path, state, guard=RefuseNonFinite(keep=folder)) as saver:
        told = told_by(saver)
        first = outcome(saver, 2)
        after = outcome(saver, 3)
        state["w"].zero_()
        whole = outcome(saver, 4)
        before = kept(folder)
        state["w"].fill_(NAN)
        outcome(saver, 5, slot="s2")

    assert [PIECE_BYTES, PIECE_BYTES] == pieces[:2]
    assert [] == before
    assert ["j/step-5-attempt-1-rank-0.safetensors"] == kept(folder), "the next row has its file"
    assert [NonFiniteError, NonFiniteError] == [type(first), type(after)]
    assert whole is None
    (message,) = told
    assert message.startswith("step 2, refused, is not kept: [Errno 28]")


def test_what_a_dead_process_has_begun_makes_room_first(tmp_path):
    folder = tmp_path / "kept"
    left = kept_files.KeptFile(folder / "j", 7, 9, 0).begun
    left.parent.mkdir(parents=True)
    left.write_text("half of it")

    saved(tmp_path, {"w": torch.tensor([NAN])}, RefuseNonFinite(keep=folder))

    assert ["j/step-2-attempt-1-rank-0.safetensors"] == kept(folder)


def test_a_copy_that_cannot_be_looked_at_is_not_kept_and_begins_no_row(tmp_path, monkeypatch):
    """Nobody has found anything in it."""
    folder = tmp_path / "kept"
    guard = RefuseNonFinite(keep=folder)
    with saver_of(tmp_path, {"w": torch.tensor([NAN])}, guard=guard) as saver:
        with monkeypatch.context() as failing:
            failing.setattr(saver._performer._finite, "non_finite", fails)
            unseen = outcome(saver, 2)
        refused = outcome(saver, 3)

    assert "it cannot be looked at" in unseen.message
    assert isinstance(refused, NonFiniteError)
    assert ["j/step-3-attempt-1-rank-0.safetensors"] == kept(folder)


def fails(*_):
    raise RuntimeError("no kernel for it")


# -- a folder that hangs ---------------------------------------------------------------------------


class Hanging:
    """A folder that takes no byte, in a call that nothing ends, until it is told to ``answer``."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self._writer, bytes(1 << 16))
        os.set_blocking(self._writer, True)
        self.is_asked = threading.Event()
        self._real = kept_files._write_all

    def write_all(self, descriptor, piece):
        self.is_asked.set()
        os.write(self._writer, bytes(1))
        self._real(descriptor, piece)

    def answer(self):
        os.read(self._reader, 1 << 20)


@pytest.fixture
def hanging(monkeypatch):
    folder = Hanging()
    monkeypatch.setattr(kept_files, "_write_all", folder.write_all)
    yield folder
    folder.answer()


class Impatient(queue.Queue):
    """Waits for no piece to be taken once the folder hangs."""

    def __init__(self, hanging) -> None:
        super().__init__(maxsize=1)
        self._hanging = hanging

    def put(self, item, block=True, timeout=None):
        while self.full() and not self._hanging.is_asked.wait(0.01):
            continue
        super().put(item, block, 0.0 if self._hanging.is_asked.is_set() else timeout)


def ended(saver, made):
    """Return why a save has failed once its copy has ended; None: its slot was closed."""
    assert saver._performer.engine.wait(30)
    saver._performer.engine.close(30)
    return made._failure


def test_a_folder_that_hangs_holds_up_neither_training_nor_the_next_save(tmp_path, hanging):
    """The refusal is told at once; the slot is not written while it is read."""
    folder, state = tmp_path / "kept", {"w": torch.full((STATE_BYTES // 4,), NAN)}
    with saver_of(tmp_path, state, guard=RefuseNonFinite(keep=folder)) as saver:
        saver.on_view(SessionView(version="2", leases=(saver.lease(slot="s1"),)))
        refused = ended(saver, saver.save(2))
        assert hanging.is_asked.wait(30)
        state["w"].zero_()
        without = saver.save(3)
        saver.on_view(SessionView(version="3", leases=(saver.lease(slot="s2"),)))
        after = ended(saver, saver.save(4))
        hanging.answer()
        saver.await_kept(30)
        back = ended(saver, saver.save(5))

        assert [NonFiniteError, type(None), type(None)] == [type(refused), type(after), type(back)]
        assert "no free slot" in without._failure.message
    (name,) = kept(folder)
    found = {unranked(key): tensor for key, tensor in load_file(folder / name).items()}
    assert found["w"].isnan().all()


def test_a_folder_that_hangs_for_long_is_given_up_and_its_slot_is_used_again(
    tmp_path, monkeypatch, hanging
):
    """Said once, on time; neither a Checkpointer nor a process waits for it to end."""
    monkeypatch.setattr(refused_parts.queue, "Queue", lambda maxsize: Impatient(hanging))
    folder, state = tmp_path / "kept", {"w": torch.full((STATE_BYTES // 4,), NAN)}
    before = threading.enumerate()
    with saver_of(tmp_path, state, guard=RefuseNonFinite(keep=folder)) as saver:
        made = set(threading.enumerate()) - set(before)
        told = told_by(saver)
        saver.on_view(SessionView(version="2", leases=(saver.lease(),)))
        ended(saver, saver.save(2))
        saver.await_kept(30)
        state["w"].zero_()
        after = ended(saver, saver.save(3))
        state["w"].fill_(NAN)
        saver.on_view(SessionView(version="3", leases=(saver.lease(slot="s2"),)))
        later = ended(saver, saver.save(4))
        saver.close(1e6)
        (writer,) = [one for one in made if one.name == THREAD_NAME]

        assert after is None
        assert isinstance(later, NonFiniteError)
        (message,) = told
        assert f"{folder / 'j'} has taken nothing for 30 s" in message
        assert writer.daemon
        hanging.answer()
        writer.join(30)
        assert not writer.is_alive()
    assert [] == kept(folder)


def test_a_slot_that_cannot_be_read_to_its_end_makes_no_file(tmp_path, monkeypatch):
    """What was read of it has a header, and would look like a whole one."""
    folder, state = tmp_path / "kept", {"w": torch.full((STATE_BYTES // 4,), NAN)}
    real = SlotBuffer.between

    def between(buffer, begin, end):
        if begin == PIECE_BYTES and end == 2 * PIECE_BYTES:
            raise PreconditionError("slot s1 is not being written")
        return real(buffer, begin, end)

    with saver_of(tmp_path, state, guard=RefuseNonFinite(keep=folder)) as saver:
        told = told_by(saver)
        monkeypatch.setattr(SlotBuffer, "between", between)
        first = outcome(saver, 2)
        monkeypatch.undo()
        state["w"].zero_()
        after = outcome(saver, 3)

    assert [NonFiniteError, type(None)] == [type(first), type(after)]
    assert [] == kept(folder)
    (message,) = told
    assert "its slot cannot be read: slot s1 is not being written" in message


def test_while_a_file_is_written_another_one_is_not_and_that_is_said(tmp_path, hanging):
    folder, state = tmp_path / "kept", {"w": torch.tensor([NAN])}
    with saver_of(tmp_path, state, guard=RefuseNonFinite(keep=folder)) as saver:
        told = told_by(saver)
        for step, value in ((2, NAN), (3, 1.0), (4, NAN)):
            state["w"][0] = value
            saver.on_view(SessionView(version=f"{step}", leases=(saver.lease(slot=f"s{step}"),)))
            ended(saver, saver.save(step))
        hanging.answer()
        saver.await_kept(30)

    assert ["step 4, refused, is not kept: an earlier one is still being written"] == told
    assert ["j/step-2-attempt-1-rank-0.safetensors"] == kept(folder)


def test_what_is_still_being_written_at_the_end_is_waited_for(tmp_path, hanging):
    folder = tmp_path / "kept"
    guard = RefuseNonFinite(keep=folder)
    with saver_of(tmp_path, {"w": torch.tensor([NAN])}, guard=guard) as saver:
        saver.on_view(SessionView(version="2", leases=(saver.lease(),)))
        saver.save(2)
        assert hanging.is_asked.wait(30)
        threading.Timer(0.2, hanging.answer).start()
        saver.close(30)

    assert ["j/step-2-attempt-1-rank-0.safetensors"] == kept(folder)


# -- notes -----------------------------------------------------------------------------------------


def test_a_bad_note_counts_for_stop_after_also_where_the_step_finds_no_slot(tmp_path):
    """What is refused for its loss is refused, whether or not it could have been copied."""
    guard = RefuseNonFinite(keep=tmp_path / "kept", stop_after=2)
    with saver_of(tmp_path, {"w": torch.ones(1)}, guard=guard) as saver:
        first = saver.save(2, {"loss": NAN})
        saver.note_step(3)
        saver.check_refusals()
        saver.save(3, {"loss": NAN})
        saver.note_step(4)
        with pytest.raises(NonFiniteError, match=r"2 saves in a row .*notes\['loss'\]"):
            saver.check_refusals()

    assert "step 2 is refused: NaN or infinity in notes['loss']" == first._failure.message

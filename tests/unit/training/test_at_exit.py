"""``AtExit()``: the last step is saved as training ends, on real slots and threads (G7)."""

import threading

import pytest
import torch
from tests.unit.training.savers import saver_of, stepped

from holdfast.core.session import SessionView
from holdfast.errors import NonFiniteError
from holdfast.guards import RefuseNonFinite


def test_at_exit_the_step_that_was_done_last_is_saved_once(tmp_path):
    """G7: no copy before; and one that is saved already is not saved again."""
    with saver_of(tmp_path, {"w": torch.ones(3)}) as saver:
        lease = saver.lease()
        saver.on_view(SessionView(version="1", leases=(lease,)))
        saver.note_step(7)
        assert saver._performer.latest is None
        saver.close(0.0, save_last=True)
        taken = saver._performer.latest
        saver.close(0.0, save_last=True)

        assert (7, True) == (taken.step, taken.copied)
        assert taken is saver._performer.latest


def test_at_exit_a_step_that_training_has_gone_beyond_is_not_saved(tmp_path):
    """What the state is by then, no step has been."""
    state = stepped(torch.nn.Parameter(torch.ones(3)))
    with saver_of(tmp_path, state) as saver:
        saver.on_view(SessionView(version="1", leases=(saver.lease(),)))
        saver.note_step(7)
        state["optimizer"].step()
        with pytest.warns(UserWarning, match=r"step 7 is not saved at exit.*since step\(7\)"):
            saver.close(0.0, save_last=True)

        assert saver._performer.latest is None


def test_at_exit_the_notes_of_the_last_step_go_with_it(tmp_path):
    """What was said of it, not what the script has made of its mapping since."""
    notes = {"loss": 0.5}
    with saver_of(tmp_path, {"w": torch.ones(3)}, at_exit=True) as saver:
        posted = []
        saver.session.post = lambda **said: posted.append(said.get("note"))
        saver.on_view(SessionView(version="1", leases=(saver.lease(),)))
        saver.note_step(6, notes={"loss": 9.0})
        saver.note_step(7, notes=notes)
        notes["loss"] = 8.0
        saver.close(0.0, save_last=True)

        assert [(7, '{"loss":0.5}')] == [(note.step, note.json) for note in posted if note]


def test_at_exit_a_loss_that_is_no_number_refuses_the_step(tmp_path):
    """G21: a guard looks at what was said of the step, whoever saves it."""
    state = {"w": torch.ones(3)}
    with saver_of(tmp_path, state, guard=RefuseNonFinite(), at_exit=True) as saver:
        saver.on_view(SessionView(version="1", leases=(saver.lease(),)))
        saver.note_step(7, notes={"loss": float("nan")})
        saver.close(0.0, save_last=True)

        assert isinstance(saver._handles.get(7).error, NonFiniteError)


def test_at_exit_no_thread_has_to_start(tmp_path, monkeypatch):
    """From Python 3.12 on, none does once the interpreter has begun to end."""
    state = stepped(torch.nn.Parameter(torch.ones(3)))

    def refuse(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with saver_of(tmp_path, state, guard=RefuseNonFinite(), at_exit=True) as saver:
        saver.on_view(SessionView(version="1", leases=(saver.lease(),)))
        state["optimizer"].step()
        saver.note_step(7)
        with monkeypatch.context() as ending:
            ending.setattr(threading.Thread, "start", refuse)
            saver.close(5.0, save_last=True)

        assert saver._performer.latest.copied

"""``AtExit()``: the last step is saved as training ends, on real slots and threads (G7)."""

import pytest
import torch
from tests.unit.training.savers import saver_of, stepped

from holdfast.core.session import SessionView


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

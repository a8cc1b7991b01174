"""Epochs are counted over restarts (F82)."""

import pytest

from holdfast.elastic.epochs import remaining_epochs_until
from holdfast.errors import InvalidRequestError


def test_the_epoch_in_which_a_job_was_killed_is_entered_again():
    epochs = remaining_epochs_until(5)
    for epoch in epochs:
        if epoch == 2:
            saved = epochs.state_dict()
            break
    again = remaining_epochs_until(5)
    again.load_state_dict(saved)

    assert len(again) == 3
    assert list(again) == [2, 3, 4]
    assert (len(again), list(again)) == (0, [])


def test_the_end_is_that_of_the_script():
    epochs = remaining_epochs_until(2)
    list(epochs)
    longer = remaining_epochs_until(4)
    longer.load_state_dict(epochs.state_dict())

    assert list(longer) == [2, 3]


@pytest.mark.parametrize("end", [-1, 2.0, "3", None, True])
def test_an_end_that_is_none_is_refused(end):
    with pytest.raises(InvalidRequestError, match=r"remaining_epochs_until\("):
        remaining_epochs_until(end)

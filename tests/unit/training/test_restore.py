"""What of a checkpoint a user may ask for."""

import pytest

from holdfast.errors import InvalidRequestError
from holdfast.training.restore import Part

NAMES = ("model", "optimizer")


def test_all_or_some_names_of_the_state_are_loaded():
    """X6."""
    assert Part(strict=False) == Part.of(NAMES, strict=False, only=None)
    assert Part(only=("model",)) == Part.of(NAMES, strict=True, only={"model"})


@pytest.mark.parametrize("only", ["model", ["modle"], ["model.weight"]])
def test_a_name_that_the_state_lacks_is_refused(only):
    """A typing error must not load nothing."""
    with pytest.raises(InvalidRequestError, match="pass names of state"):
        Part.of(NAMES, strict=True, only=only)

"""A world of ranks of which this process is one at a time."""

import pytest
from tests.unit.state import worlds


@pytest.fixture
def world():
    """Make this process one rank of several; the others are not there, so nothing is computed."""
    with worlds.becoming() as become:
        yield become

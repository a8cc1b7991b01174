"""What was there before is not looked through for what counts batches: that takes a while."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _known_objects():
    """Before each test: the first one of a file has imported a library of a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _all_objects():
    yield
    gc.unfreeze()

"""A store with one checkpoint of two ranks that holds every dtype."""

from __future__ import annotations

import pytest
from tests.integration.convert import made

from holdfast.convert.reading import CheckpointReader
from holdfast.objectstore import open_store


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"), make=True)


@pytest.fixture
def tensors():
    return made.everything()


@pytest.fixture
def folder(store, tensors):
    return made.put(store, made.two_ranks(tensors))


@pytest.fixture
def reader(folder):
    with CheckpointReader(folder) as reader:
        yield reader

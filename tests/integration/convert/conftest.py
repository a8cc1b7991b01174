"""A store with one checkpoint of two ranks that holds every dtype."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from holdfast.convert.reading import CheckpointReader
from holdfast.objectstore import open_store

_SPEC = importlib.util.spec_from_file_location(
    "holdfast_test_made", Path(__file__).with_name("made.py")
)
made = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(made)


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

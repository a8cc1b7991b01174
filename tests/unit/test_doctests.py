"""The examples in docstrings say what is so."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def examples():
    """Return the modules with a ``>>>`` in them, by name."""
    for folder in (ROOT / "sdk", ROOT / "services"):
        for path in sorted(folder.rglob("*.py")):
            if ">>> " in path.read_text():
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join(parts).removesuffix(".__init__")


MODULES = list(examples())


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_hold(name):
    failed, tried = doctest.testmod(importlib.import_module(name))

    assert tried
    assert not failed


def test_there_are_examples():
    assert MODULES

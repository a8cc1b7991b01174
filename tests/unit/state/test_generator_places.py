"""Generators of random numbers that a loader's parts have go on where they were saved."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.unit.state.test_places import Numbers, generators, with_sampler
from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError
from holdfast.state.places import Places


class Counted(random.Random):
    """A subclass that keeps more than what it inherits."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return super().random()


MADE = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "random": random.Random,
    "numpy": np.random.default_rng,
    "numpy.old": np.random.RandomState,
}
DRAW = {
    "torch": lambda it: torch.rand(3, generator=it).tolist(),
    "random": lambda it: [it.random(), it.gauss(0, 1)],
    "numpy": lambda it: it.random(3).tolist(),
    "numpy.old": lambda it: [*it.rand(3), it.randn()],
}


@pytest.mark.parametrize("kind", MADE)
def test_a_generator_goes_on_where_it_was_saved_and_stays_the_very_object(kind):
    there, here = with_sampler(rng=MADE[kind](1)), with_sampler(rng=MADE[kind](2))
    of_there, of_here, held = Places(there), Places(here), here.sampler.rng
    DRAW[kind](there.sampler.rng)  # of a normal pair the second is kept
    of_here.put(of_there.take())

    assert held is here.sampler.rng
    assert DRAW[kind](there.sampler.rng) == DRAW[kind](here.sampler.rng)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("other", [None, *MADE])
def test_a_generator_of_another_kind_is_replaced(kind, other):
    if other == kind:
        other = None
    there = with_sampler(rng=MADE[kind](1))
    here = with_sampler(rng=MADE[other](1) if other else None)
    Places(here).put(Places(there).take())
    assert type(there.sampler.rng) is type(here.sampler.rng)
    assert DRAW[kind](there.sampler.rng) == DRAW[kind](here.sampler.rng)


@pytest.mark.parametrize("kind", [np.random.Generator, np.random.RandomState])
@pytest.mark.parametrize("here", [np.random.default_rng, np.random.RandomState, lambda: None])
def test_a_generator_of_numpy_with_other_bits_is_replaced(kind, here):
    """PCG64 cannot take the state of Philox, nor can MT19937."""
    there, here = with_sampler(rng=kind(np.random.Philox(5))), with_sampler(rng=here())
    Places(here).put(Places(there).take())
    assert type(there.sampler.rng) is type(here.sampler.rng)
    assert there.sampler.rng.standard_normal() == here.sampler.rng.standard_normal()


@pytest.mark.parametrize("bits", ["seed", "default_rng", "Generator", "NoSuch"])
def test_only_generators_of_bits_are_made_by_a_saved_name(bits):
    """A checkpoint may come from anywhere."""
    marks = Places(with_sampler(rng=np.random.default_rng(5))).take()
    marks["generators"]["sampler.rng"][1]["bit_generator"] = bits
    with pytest.raises(InvalidRequestError, match=f"'{bits}', which NumPy here cannot make"):
        Places(with_sampler(rng=None)).put(marks)


def test_the_generator_of_the_loader_itself_is_a_place():
    there = DataLoader(Numbers(), shuffle=True, generator=torch.Generator().manual_seed(3))
    here = DataLoader(Numbers(), shuffle=True, generator=torch.Generator())
    assert "generator" in generators(Places(there))
    Places(here).put(Places(there).take())
    assert list(there) == list(here)


def test_a_subclass_of_pythons_generator_goes_on_with_what_else_it_keeps():
    there, here = with_sampler(rng=Counted(1)), with_sampler(rng=Counted(2))
    of_there, of_here, held = Places(there), Places(here), here.sampler.rng
    there.sampler.rng.random()
    of_here.put(of_there.take())

    assert held is here.sampler.rng
    assert there.sampler.rng.random() == here.sampler.rng.random()
    assert 2 == there.sampler.rng.drawn
    assert 2 == here.sampler.rng.drawn


def test_a_generator_without_a_state_is_left():
    """It draws from the system."""
    assert {} == generators(Places(with_sampler(rng=random.SystemRandom())))

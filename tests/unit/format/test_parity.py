"""Weights of parity: the fixed numbers, and what follows from them."""

from itertools import combinations

import pytest

from holdfast.format import parity


def test_the_field_is_that_of_the_page():
    assert parity.product(2, 128) == 0x1D
    assert parity.product(0, 7) == parity.product(7, 0) == 0
    assert all(parity.product(one, parity.inverse(one)) == 1 for one in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        parity.inverse(0)


def test_the_weights_are_those_of_the_page():
    """Elements of one version are read by others: these numbers never change."""
    assert parity.MATRIX == "cauchy-255"
    assert [parity.weight(0, i) for i in range(4)] == [253, 126, 255, 127]
    assert [parity.weight(1, i) for i in range(4)] == [126, 253, 127, 255]


def test_no_weight_is_nothing_up_to_the_limits():
    weights = {
        parity.weight(e, i) for e in range(parity.ELEMENTS_MAX) for i in range(parity.MEMBERS_MAX)
    }
    assert 0 not in weights


@pytest.mark.parametrize(("members", "elements"), [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (6, 3)])
def test_any_losses_up_to_the_elements_are_made_up_for(members, elements):
    data = [17 * i + 3 for i in range(members)]
    made = [_sum(parity.terms_of_element(e, members), data, []) for e in range(elements)]
    pieces = range(members + elements)
    for lost in combinations(pieces, elements):
        held = [i for i in range(members) if i not in lost]
        there = [e for e in range(elements) if members + e not in lost]
        for member in set(lost) & set(range(members)):
            terms = parity.terms_of_member(member, members, held=held, elements=there)
            assert len(terms) <= members
            assert _sum(terms, data, made) == data[member], (lost, member)


def test_a_held_member_is_rebuilt_from_the_others():
    """Of a copy whose bytes are bad nothing is taken."""
    terms = parity.terms_of_member(1, 3, held=[0, 1, 2], elements=[1, 0])
    assert {(t.number, t.is_element) for t in terms} == {(0, False), (2, False), (1, True)}


def test_too_few_pieces_are_refused_with_their_numbers():
    with pytest.raises(ValueError, match="1 members and 1 elements are fewer than 3 pieces"):
        parity.terms_of_member(0, 3, held=[2], elements=[1])


def test_an_element_named_twice_counts_once():
    with pytest.raises(ValueError, match="fewer"):
        parity.terms_of_member(0, 3, held=[2], elements=[1, 1])


def _sum(terms, data, made):
    total = 0
    for term in terms:
        total ^= parity.product(term.weight, (made if term.is_element else data)[term.number])
    return total

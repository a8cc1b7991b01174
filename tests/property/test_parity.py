"""Stripes of drawn shards: any losses up to the elements are made up for, byte for byte."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.format import parity
from holdfast_services.agent import isal


def total(terms, members, elements, length):
    """Return the first ``length`` bytes of a sum of pieces, shorter ones with zeros behind."""
    found = bytearray(length)
    pieces = [(elements if term.is_element else members)[term.number] for term in terms]
    isal.write_sum(
        memoryview(found),
        [(t.weight, memoryview(bytearray(p))) for t, p in zip(terms, pieces, strict=True)],
    )
    return bytes(found)


@given(
    members=st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=6),
    elements_count=st.integers(1, 3),
    data=st.data(),
)
def test_any_losses_up_to_the_elements_come_back(members, elements_count, data):
    count, length = len(members), max(map(len, members))
    elements = [
        total(parity.terms_of_element(e, count), members, [], length) for e in range(elements_count)
    ]
    pieces = range(count + elements_count)
    lost = data.draw(st.sets(st.sampled_from(pieces), max_size=elements_count))
    held = [i for i in range(count) if i not in lost]
    there = data.draw(st.permutations([e for e in range(elements_count) if count + e not in lost]))
    for member in lost & set(range(count)):
        terms = parity.terms_of_member(member, count, held=held, elements=there)
        gone = [piece if i in held else b"lost" for i, piece in enumerate(members)]
        assert total(terms, gone, elements, len(members[member])) == members[member]

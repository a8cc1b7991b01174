"""Elements of parity in a simulated node: made of what lies on others, and lost shards out of them.

What ``agent.parity_maker`` does, over the arenas of ``Node``s: each piece is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.simulation.segments import root
from tests.simulation.world import Do

from holdfast.core.slot_names import SlotName
from holdfast.core.stripes import Element, Stripe
from holdfast.format import parity
from holdfast_services.agent import isal
from holdfast_services.agent.domain import HeldSum
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.state import GivenPiece, Rebuilding

if TYPE_CHECKING:
    from tests.simulation.node import File, Node

MAKE_S_MAX = 0.1

Pieces = dict[tuple[bool, int], bytes]


class Collecting:
    """Asks for the pieces of a stripe, one after the other; ``then`` hears what came of them."""

    def __init__(self, node: Node, source: Rebuilding, then: Callable[[Pieces], None]) -> None:
        self._node, self._stripe, self._then = node, source.stripe, then
        self._life = node.life
        self._left = [(piece, peer.node) for piece in source.pieces for peer in piece.peers]
        self._found: Pieces = {}

    def begin(self) -> None:
        """Ask the next holder of a piece that has not come."""
        node = self._node
        if not node.alive(self._life):
            return
        while self._left:
            piece, holder = self._left.pop(0)
            if (piece.is_element, piece.number) not in self._found:
                self._ask(piece, holder)
                return
        node.soon(MAKE_S_MAX, lambda: self._then(self._found))

    def _ask(self, piece: GivenPiece, holder: str) -> None:
        node = self._node

        def take() -> Do | None:
            there = node.nodes[holder]
            if there.state is None:
                return None
            found = _served(there, self._stripe, piece)
            if found is None:
                return self.begin
            name, data = found
            return lambda: self._came(piece, holder, name, data)

        node.world.call(node.name, holder, take, self.begin)

    def _came(self, piece: GivenPiece, holder: str, name: SlotName, data: bytes) -> None:
        if root(data) == piece.root_digest:
            self._found[piece.is_element, piece.number] = data
        else:
            self._suspect(piece, holder, name)
        self.begin()

    def _suspect(self, piece: GivenPiece, holder: str, name: SlotName) -> None:
        node = self._node

        def look() -> Do | None:
            there = node.nodes[holder]
            if there.state is not None:
                said = ev.ElementSuspected(name) if piece.is_element else ev.Suspected(name)
                there.feed(said)
            return lambda: None

        node.world.call(node.name, holder, look, lambda: None)


def _served(there: Node, stripe: Stripe, piece: GivenPiece) -> tuple[SlotName, bytes] | None:
    assert there.state is not None
    if piece.is_element:
        slot = there.state.elements().get(Element(stripe=stripe, number=piece.number).key)
    else:
        slot = there.state.held(stripe.members[piece.number].id)
    file: File | None = there.file(slot.name) if slot else None
    if slot is None or file is None:
        return None
    if not piece.is_element and file.shard != stripe.members[piece.number]:
        return None
    return slot.name, file.data


def make(node: Node, action: ev.MakeElement) -> None:
    """Make an element of all members, or say why not."""
    stripe = action.element.stripe
    terms = parity.terms_of_element(action.element.number, len(stripe.members))

    def then(found: Pieces) -> None:
        file = node.file(action.name)
        if len(found) < len(stripe.members) or file is None:
            node.feed(ev.ElementFailed(action.name, action.element.key, "a member is missing"))
            return
        file.data = summed(terms, found, stripe.length_bytes)
        held = HeldSum(
            element=action.element,
            root_digest=root(file.data),
            digests=b"",
            member_digests=tuple(b"" for _ in stripe.members),
        )
        node.summed(file, held)
        node.feed(ev.ElementMade(action.name, held))

    Collecting(node, action.members, then).begin()


def rebuilt(source: Rebuilding, lost: int, found: Pieces) -> bytes | None:
    """Return the bytes of a lost member; None: too few pieces came."""
    members = source.stripe.members
    try:
        terms = parity.terms_of_member(
            lost, len(members),
            held=[number for is_element, number in found if not is_element],
            elements=[number for is_element, number in found if is_element],
        )  # fmt: skip
    except ValueError:
        return None
    return summed(terms, found, members[lost].length_bytes)


def summed(terms: Sequence[parity.Term], found: Pieces, length_bytes: int) -> bytes:
    """Return the sum of pieces."""
    target = bytearray(length_bytes)
    pieces = [(t.weight, memoryview(bytearray(found[t.is_element, t.number]))) for t in terms]
    isal.write_sum(memoryview(target), pieces)
    return bytes(target)

"""Parity with real agents over real sockets: elements are made, nodes lost, shards made again.

The catalogue is the test's: it says which stripes there are and who has what of them.
"""

from __future__ import annotations

import json

import pytest

from holdfast.core.ids import CheckpointId
from holdfast.core.node_view import ElementWant, Want, WantReason
from holdfast.core.sources import Rebuilt
from holdfast.core.stripes import Element, Piece, Stripe
from holdfast.format.header import parse_header
from holdfast.rpc import codec
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import common_pb2

from .harness import RUN, bytes_of, reported, restart, until

MIB = 1 << 20
LENGTHS = (33 * MIB, 17 * MIB + 12)
"""Three parts and two: the second shard ends within a part of the first."""


class Scene:
    """Two nodes with a shard each, ``a`` and ``b``; ``c`` and ``d`` for the elements of both."""

    def __init__(self, node, catalogue, saved, lengths=LENGTHS) -> None:
        self.node, self.catalogue = node, catalogue
        self.nodes = {name: node(name) for name in "abcd"}
        reported(catalogue, *"abcd")
        catalogue.set_run()
        self.shards = [
            saved(self.nodes[name], length=length, rank=rank, world_size=2)[2]
            for rank, (name, length) in enumerate(zip("ab", lengths, strict=True))
        ]
        self.bytes = [bytes_of(self.nodes[n], s) for n, s in zip("ab", self.shards, strict=True)]
        self.stripe = Stripe(members=tuple(self.shards), elements_count=2)
        self.elements = [Element(stripe=self.stripe, number=number) for number in range(2)]

    def members(self) -> tuple[Piece, ...]:
        return tuple(
            Piece(number=i, is_element=False, nodes=(name,), root_digest=shard.root_digest)
            for i, (name, shard) in enumerate(zip("ab", self.shards, strict=True))
        )

    def pieces(self) -> tuple[Piece, ...]:
        """Members where they are reported, and so elements."""
        found = [p for p in self.members() if self.shards[p.number].id in self._held(p.nodes[0])]
        for number, element in enumerate(self.elements):
            nodes = tuple(n for n in "cd" if element.key in self.catalogue.elements(n))
            if nodes:
                held = self.catalogue.elements(nodes[0])[element.key]
                found.append(
                    Piece(number=number, is_element=True, nodes=nodes, root_digest=held.root_digest)
                )
        return tuple(found)

    def _held(self, name):
        return self.catalogue.held(name)

    def wanted(self, number: int) -> tuple[ElementWant, ...]:
        return (ElementWant(element=self.elements[number], pieces=self.members()),)

    def make_both(self) -> None:
        self.catalogue.set_run(elements={"c": self.wanted(0), "d": self.wanted(1)})
        for name, element in zip("cd", self.elements, strict=True):
            until(lambda: element.key in self.catalogue.elements(name), "an element")  # noqa: B023

    def lose(self, *names: str) -> None:
        for name in names:
            self.nodes[name].kill()
            del self.catalogue.inventories[name]

    def rebuild(self, name: str, *ranks: int, reason=WantReason.REPAIR) -> None:
        source = Rebuilt(self.stripe, self.pieces())
        wants = tuple(
            Want(shard=self.shards[rank], sources=(source,), reason=reason, owner="ab"[rank])
            for rank in ranks
        )
        self.catalogue.set_run(wants={name: wants})


@pytest.fixture
def scene(node, catalogue, saved):
    return Scene(node, catalogue, saved)


def flip(node, suffix, at=MIB):
    with (node.arena / node.files(suffix)[0]).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_two_lost_nodes_come_back_bit_for_bit(scene, node, catalogue):
    """G4: of 2+2 any two; uneven shards, in parts that end within each other."""
    scene.make_both()
    for name in "cd":
        assert not catalogue.held(name), "an element is no shard"
    scene.lose("a", "b")
    e = node("e")
    reported(catalogue, "e")
    scene.rebuild("e", 0, 1)

    until(lambda: {s.id for s in scene.shards} <= set(catalogue.held("e")), "both made again")
    for rank, shard in enumerate(scene.shards):
        held = catalogue.held("e")[shard.id]
        assert (shard, "ab"[rank]) == (held.shard, held.owner)
        assert scene.bytes[rank] == bytes_of(e, shard)


def test_one_lost_node_comes_back_from_a_member_and_an_element(scene, node, catalogue):
    scene.make_both()
    scene.lose("b", "d")
    e = node("e")
    reported(catalogue, "e")
    scene.rebuild("e", 1)
    until(lambda: scene.shards[1].id in catalogue.held("e"), "made again")
    assert scene.bytes[1] == bytes_of(e, scene.shards[1])


def test_heads_of_lost_shards_are_read_without_making_these(scene, node, catalogue):
    """Else a rank that needs a part of a lost shard has to fetch all of the checkpoint."""
    scene.make_both()
    scene.lose("a", "b")
    e = node("e")
    reported(catalogue, "e")
    scene.rebuild("e", 0, 1, reason=WantReason.HEAD)
    until(lambda: len(e.dump()["view"]["wants"]) == 2, "told")
    checkpoint = codec.to_message(scene.shards[0].id.checkpoint, common_pb2.CheckpointId)
    asked = pb.HeadsRequest(job="job", checkpoint=checkpoint, ranks=(0, 1))

    found = {head.rank: head for head in e.call("FindHeads", asked).heads}

    assert found.keys() == {0, 1}
    for rank, head in found.items():
        assert scene.bytes[rank].startswith(head.data)
        assert scene.shards[rank].id == parse_header(head.data, head.length_bytes).identity.id
    assert not catalogue.held("e")


def test_who_makes_a_shard_may_hold_a_piece_itself(scene, catalogue):
    scene.make_both()
    scene.lose("a", "b")
    scene.rebuild("c", 0)
    until(lambda: scene.shards[0].id in catalogue.held("c"), "made again")
    assert scene.bytes[0] == bytes_of(scene.nodes["c"], scene.shards[0])


def test_a_corrupt_element_is_dropped_and_another_one_taken(scene, node, catalogue):
    """P3: a piece is verified as it comes; its holder hears of it."""
    scene.make_both()
    flip(scene.nodes["c"], "elem", at=20 * MIB)
    scene.lose("b")
    e = node("e")
    reported(catalogue, "e")
    scene.rebuild("e", 1)

    until(lambda: scene.shards[1].id in catalogue.held("e"), "made again")
    assert scene.bytes[1] == bytes_of(e, scene.shards[1])
    until(lambda: not catalogue.elements("c"), "dropped")
    assert [] == scene.nodes["c"].files("elem")
    assert 1 == len(until(lambda: catalogue.said("quarantined"), "told"))


def test_a_corrupt_member_goes_into_no_element(scene, catalogue):
    """The element is begun again, without the bad copy if there is another."""
    flip(scene.nodes["b"], "seg")
    catalogue.set_run(elements={"c": scene.wanted(0)})

    [why] = until(lambda: catalogue.said("element_failed"), "told")
    assert "b: " in why
    shard = scene.shards[1].id
    until(lambda: catalogue.held("b")[shard].state.name == "QUARANTINED", "suspected")
    assert not catalogue.elements("c")
    assert [] == scene.nodes["c"].files("elem")


def test_a_member_that_dies_meanwhile_is_waited_for(scene, catalogue):
    scene.nodes["a"].kill()
    catalogue.set_run(elements={"c": scene.wanted(0)})
    until(lambda: catalogue.said("element_failed"), "told")
    assert not catalogue.elements("c")

    before = catalogue.inventories["a"].incarnation
    scene.nodes["a"].start()
    until(lambda: catalogue.inventories["a"].incarnation > before, "reported again")
    catalogue.set_run(elements={"c": scene.wanted(0)})
    until(lambda: catalogue.elements("c"), "made after all")


def test_an_element_outlives_its_agent_by_its_sidecar(scene, catalogue):
    scene.make_both()
    before = catalogue.elements("c")
    restart(scene.nodes["c"], catalogue)
    assert before == catalogue.elements("c")

    scene.nodes["c"].kill()
    [sum_file] = scene.nodes["c"].arena.glob("*.sum")
    said = json.loads(sum_file.read_text())
    assert [s.id.key for s in scene.shards] == [member["shard"] for member in said["members"]]
    said["matrix"] = "another"
    sum_file.write_text(json.dumps(said))
    scene.nodes["c"].start()
    until(lambda: not catalogue.elements("c"), "nobody can say what it is")
    assert [] == scene.nodes["c"].files("elem")


def test_an_element_goes_with_its_step_and_not_before(scene, catalogue):
    scene.make_both()
    kept = CheckpointId(RUN, 3, scene.shards[0].id.generation)
    catalogue.set_run(free_before=kept)
    later = CheckpointId(RUN, 4, kept.generation)
    catalogue.set_run(free_before=later, pinned=(kept,))
    until(lambda: scene.nodes["c"].dump()["view"]["version"] == catalogue.common.version, "seen")
    assert catalogue.elements("c")

    catalogue.set_run(free_before=later, pinned=())
    until(lambda: not catalogue.elements("c") and not catalogue.elements("d"), "freed")

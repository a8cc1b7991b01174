"""Replication, restore, repair and bad sources with real agents that talk over real sockets."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from dataclasses import replace

import pytest
from tests.said import tcp

from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId
from holdfast.core.inventory import Endpoint, HeldState, Peer
from holdfast.core.node_view import WantReason
from holdfast.core.protection import Copies
from holdfast.core.sources import Memory
from holdfast.errors import CheckpointError, ExhaustedError, PreconditionError
from holdfast.rpc import codec
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import common_pb2

from .harness import (
    RUN,
    Trainer,
    committed,
    decision,
    open_session,
    reported,
    restart,
    shard_message,
    until,
    want,
)

MIB = 1 << 20


def seg_bytes(node):
    return {(node.arena / name).read_bytes() for name in node.files("seg")}


def test_the_owner_asks_its_backup_which_fetches_verifies_and_holds(node, catalogue, saved):
    """F50-F57, 4.5: under the same id, owner named, bytes equal."""
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    catalogue.set_run(ring=("a", "b"), copies=Copies(1))
    _, _, shard = saved(a, length=20 * MIB, replicas=1)

    held = until(lambda: catalogue.held("b").get(shard.id), "copy at b")
    assert (shard, "a", HeldState.SEALED) == (held.shard, held.owner, held.state)
    assert seg_bytes(a) == seg_bytes(b)


def test_replication_goes_on_while_metadata_is_down(node, catalogue, saved):
    """G18, P5: the last known peers are enough."""
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    catalogue.set_run(ring=("a", "b"), copies=Copies(1))
    t, generation, _ = saved(a, replicas=1)
    until(lambda: catalogue.held("b"), "first copy")
    catalogue.stop()
    lease = until(lambda: [x for x in a.view(t.session).leases if x.incarnation], "a second lease")[
        0
    ]
    assert "closed" == t.ask("write", lease.slot, lease.incarnation, 4, generation)

    until(lambda: len(b.files("seg")) == 2, "second copy without metadata")
    catalogue.start()
    until(lambda: {3, 4} == {s.step for s in catalogue.held("b")}, "told afterwards")


def test_a_copy_at_a_rate_hurries_once_a_restore_waits_for_it(node, catalogue, saved):
    """4.5: it would take a minute; nobody is told of it as a failure."""
    a, b = node("a"), node("b", HOLDFAST_REPLICATE_RATE="1MiB")
    reported(catalogue, "a", "b")
    catalogue.set_run(ring=("a", "b"), copies=Copies(1))
    _, _, shard = saved(a, length=64 * MIB, replicas=1)
    until(lambda: '"under_way": true' in json.dumps(b.dump()["fetches"]), "copy begun")
    assert not catalogue.held("b")
    catalogue.set_run(wants={"b": (want(shard, "a"),)})

    held = until(lambda: catalogue.held("b").get(shard.id), "copy at b")
    assert (shard, HeldState.SEALED) == (held.shard, held.state)
    assert seg_bytes(a) == seg_bytes(b)
    assert [] == catalogue.said("replication_failed")


@pytest.mark.parametrize("lost", ["owner", "backup"])
def test_while_the_next_copy_comes_the_one_before_is_whole_elsewhere(node, catalogue, saved, lost):
    """P5, ADR 0044: a copy takes a slot of its own, so either node may be lost with its memory."""
    a, b = node("a"), node("b", HOLDFAST_REPLICATE_RATE="16MiB")
    reported(catalogue, "a", "b")
    catalogue.set_run(ring=("a", "b"), copies=Copies(1))
    t, generation, shard = saved(a, length=32 * MIB, replicas=1)
    until(lambda: catalogue.held("b").get(shard.id), "copy of the first step", wait_s=60)
    [first] = seg_bytes(b)
    lease = until(lambda: [x for x in a.view(t.session).leases if x.incarnation], "a lease")[0]
    assert "closed" == t.ask("write", lease.slot, lease.incarnation, 4, generation, 32 * MIB)
    until(lambda: '"under_way": true' in json.dumps(b.dump()["fetches"]), "the next one comes")

    gone, left = (a, b) if lost == "owner" else (b, a)
    gone.kill()
    for path in gone.arena.glob("s*.*"):
        path.unlink()

    assert first in seg_bytes(left)
    restart(left, catalogue)
    assert catalogue.held(left.name)[shard.id].state is HeldState.SEALED
    verified = left.call_peer("Verify", pb.VerifyRequest(id=shard_message(shard).id))
    assert verified.ok


def test_more_replicas_than_nodes_are_cut_without_an_error(node, catalogue, saved):
    """F54: one node replicates to nobody; the rank is told why no step gets its copies."""
    a = node("a")
    reported(catalogue, "a")
    catalogue.set_run(ring=("a",), copies=Copies(0), shortage="replicas=2 needs 3 live nodes")
    t, _, _ = saved(a, replicas=2)

    until(lambda: a.view(t.session).shortage, "told")
    assert [] == catalogue.said("replication_failed")


def test_many_that_ask_for_one_shard_cause_one_transfer(node, catalogue, saved):
    """F48: its bytes cross the network once, every caller is answered."""
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    _, _, shard = saved(a, length=32 * MIB)
    proxy = FlippingProxy(a.ready["endpoints"][0]["address"], flips=0)
    source = replace(catalogue.inventories["a"].node, endpoints=tcp(proxy.address))
    request = pb.HoldRequest(
        shard=shard_message(shard), source=codec.to_message(source, common_pb2.Peer)
    )
    done = []
    threads = [
        threading.Thread(target=lambda: done.append(b.call_peer("Hold", request))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    proxy.close()
    assert 6 == len(done)
    assert 32 * MIB <= proxy.served_bytes < 33 * MIB
    assert 1 == len(list(b.arena.glob("s*.seg")))
    assert 32 * MIB == b.dump()["used_bytes"]


def test_a_copy_without_room_or_use_is_refused(node, catalogue, saved):
    a, b = node("a"), node("b", HOLDFAST_BUDGET="2M")
    reported(catalogue, "a", "b")
    _, generation, shard = saved(a, length=4 * MIB)
    request = pb.HoldRequest(
        shard=shard_message(shard),
        source=codec.to_message(catalogue.inventories["a"].node, common_pb2.Peer),
    )
    with pytest.raises(ExhaustedError, match="no room for a copy of 4 MiB"):
        b.call_peer("Hold", request)
    catalogue.set_run(free_before=CheckpointId(RUN, 9, generation))
    until(lambda: b.dump()["view"]["runs"], "view at b")
    with pytest.raises(PreconditionError, match="no longer wanted"):
        b.call_peer("Hold", request)


def test_a_restore_fetches_verifies_confirms_and_holds_until_loaded(node, catalogue, saved):
    """4.8: ready before confirmed, segments after, named slots never freed before loaded."""
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    t, _, shard = saved(a)
    t.end()
    new = Trainer(b.arena, secrets.token_hex(16))
    generation = open_session(b, new.session, nonce=b"m" * 16)
    catalogue.set_run(
        generation=generation,
        decision=decision([shard], generation=generation),
        wants={"b": (want(shard, "a"),)},
    )
    until(lambda: [r.ready_decision for r in catalogue.inventories["b"].ranks] == [1], "ready")
    view = b.view(new.session)
    assert view.restore.ready
    assert () == view.restore.segments

    confirmed = decision([shard], generation=generation, state=DecisionState.CONFIRMED)
    catalogue.set_run(decision=confirmed, free_before=CheckpointId(RUN, 99, generation))
    segment = until(lambda: b.view(new.session).restore.segments, "segments")[0]
    assert (shard, "peer") == (segment.shard, segment.source)
    assert shard.id in catalogue.held("b")
    until(lambda: not catalogue.held("a"), "a is not asked to keep it")
    assert (b.arena / segment.file_name).exists()

    b.call("Update", pb.UpdateRequest(session=new.session, report={"loaded": True}))
    until(lambda: catalogue.inventories["b"].ranks[0].report.loaded, "loaded reported")
    until(lambda: not catalogue.held("b"), "freed once loaded")
    new.end()


def test_own_memory_is_hashed_again_before_it_is_believed(node, catalogue, saved):
    """Interleaving 15: a byte flips at rest; restore finds it, quarantines, takes the peer's."""
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    catalogue.set_run(ring=("a", "b"), copies=Copies(1))
    t, _, shard = saved(a, replicas=1)
    until(lambda: shard.id in catalogue.held("b"), "copy at b")
    t.end()
    with (a.arena / a.files("seg")[0]).open("r+b") as file:
        file.seek(MIB // 2)
        byte = file.read(1)
        file.seek(MIB // 2)
        file.write(bytes([byte[0] ^ 1]))
    new = Trainer(a.arena, secrets.token_hex(16))
    generation = open_session(a, new.session, nonce=b"m" * 16)
    catalogue.set_run(generation=generation, decision=decision([shard], generation=generation))
    until(lambda: catalogue.held("a")[shard.id].state is HeldState.QUARANTINED, "quarantined")
    catalogue.set_run(wants={"a": (want(shard, "b"),)})
    until(lambda: catalogue.inventories["a"].ranks[-1].ready_decision == 1, "survived")

    confirmed = decision([shard], generation=generation, state=DecisionState.CONFIRMED)
    catalogue.set_run(decision=confirmed)
    segment = until(lambda: a.view(new.session).restore.segments, "segments")[0]
    assert "peer" == segment.source
    assert (a.arena / segment.file_name).read_bytes() in seg_bytes(b)
    assert 2 == len(a.files("seg")), "quarantine keeps the bad copy"
    new.end()


def test_a_source_that_serves_bad_bytes_is_named_and_the_next_one_is_taken(node, catalogue, saved):
    """P3, F70: BadSource in the inventory, the holder finds its copy bad, the shard arrives."""
    a, b, c = node("a"), node("b"), node("c")
    reported(catalogue, "a", "b", "c")
    catalogue.set_run(ring=("a", "b", "c"), copies=Copies(1))
    _, _, shard = saved(a, replicas=1)
    until(lambda: shard.id in catalogue.held("b"), "copy at b")
    with (a.arena / a.files("seg")[0]).open("r+b") as file:
        file.seek(MIB - 5)
        file.write(b"?????")
    catalogue.set_run(wants={"c": (want(shard, "a", "b", reason=WantReason.REPAIR),)})

    held = until(lambda: catalogue.held("c").get(shard.id), "copy at c")
    assert HeldState.SEALED is held.state
    assert [Memory("a")] == [bad.source for bad in catalogue.inventories["c"].bad_sources]
    until(lambda: catalogue.held("a")[shard.id].state is HeldState.QUARANTINED, "suspected")
    assert seg_bytes(b) == seg_bytes(c)


def test_a_byte_flipped_in_flight_is_asked_for_once_more(node, catalogue, saved):
    """Interleaving 15, in flight: a proxy flips one byte once; no node is blamed."""
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    _, _, shard = saved(a, length=2 * MIB)
    me = catalogue.inventories["a"].node
    proxy = FlippingProxy(me.endpoints[0].address)
    source = Peer(node="a", rpc_address=me.rpc_address, endpoints=tcp(proxy.address))
    request = pb.HoldRequest(
        shard=shard_message(shard), source=codec.to_message(source, common_pb2.Peer)
    )
    b.call_peer("Hold", request)
    proxy.close()

    assert 1 == proxy.flipped
    assert seg_bytes(a) == seg_bytes(b)
    assert () == catalogue.inventories["b"].bad_sources


def test_a_peer_that_serves_over_nothing_known_here_is_told_apart(node, catalogue, saved):
    """F70: no blame; people read which kinds the two have."""
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    _, _, shard = saved(a)
    later = (Endpoint(kind="later", address="?"),)
    source = replace(catalogue.inventories["a"].node, endpoints=later)
    request = pb.HoldRequest(
        shard=shard_message(shard), source=codec.to_message(source, common_pb2.Peer)
    )
    with pytest.raises(CheckpointError):
        b.call_peer("Hold", request)

    [why] = until(lambda: catalogue.said("fetch_failed"), "told")
    assert why.endswith("a: serves over later; this side fetches over tcp only")
    assert () == catalogue.inventories["b"].bad_sources


def test_a_node_whose_rdma_cannot_be_used_says_so_and_uses_tcp(node, catalogue, saved):
    a, b = node("a"), node("b", HOLDFAST_RDMA="nowhere0")
    reported(catalogue, "a", "b")
    _, _, shard = saved(a)
    source = codec.to_message(catalogue.inventories["a"].node, common_pb2.Peer)
    b.call_peer("Hold", pb.HoldRequest(shard=shard_message(shard), source=source))

    [why] = until(lambda: catalogue.said("transport_unused"), "told")
    assert why.startswith("rdma is not used: no RDMA device") or "no device nowhere0" in why
    assert seg_bytes(a) == seg_bytes(b)
    states = b.call("Describe", pb.DescribeRequest()).transports
    assert [("rdma", 0), ("tcp", shard.length_bytes)] == [(s.kind, s.fetched_bytes) for s in states]


def test_a_source_whose_slot_changed_is_left_without_blame(node, catalogue, saved):
    """Interleaving 6: NotFound means elsewhere, not quarantine."""
    a, _, _ = node("a"), node("b"), node("c")
    reported(catalogue, "a", "b", "c")
    catalogue.set_run(ring=("a", "b"), copies=Copies(1))
    _, _, shard = saved(a, replicas=1)
    until(lambda: shard.id in catalogue.held("b"), "copy at b")
    a.kill()
    for path in a.arena.glob("s*"):
        if path.is_file():
            path.unlink()
    restart(a, catalogue)
    until(lambda: not catalogue.held("a"), "a is empty")
    wanted = want(shard, "a", "b", reason=WantReason.REPAIR, owner="a")
    catalogue.set_run(wants={"c": (wanted,)})

    until(lambda: shard.id in catalogue.held("c"), "taken from b")
    assert () == catalogue.inventories["c"].bad_sources
    assert "a" == catalogue.held("c")[shard.id].owner


def test_an_agent_restarted_serves_what_it_held(node, catalogue, saved):
    """F41, F55: adopted by sidecar; then fetched by a peer."""
    a, _ = node("a"), node("b")
    reported(catalogue, "a", "b")
    _, _, shard = saved(a)
    restart(a, catalogue)
    until(lambda: shard.id in catalogue.held("a"), "adopted")
    catalogue.set_run(wants={"b": (want(shard, "a", reason=WantReason.REPAIR),)})
    until(lambda: shard.id in catalogue.held("b"), "served")


def test_a_copy_whose_agent_died_before_its_last_rename_stays_its_owners(node, catalogue, saved):
    """4.3, 4.5; defect C6: it is hashed again, and is no original by that."""
    a, b = node("a"), node("b")
    reported(catalogue, "a", "b")
    _, _, shard = saved(a)
    catalogue.set_run(wants={"b": (want(shard, "a", reason=WantReason.REPAIR),)})
    until(lambda: shard.id in catalogue.held("b"), "a copy")
    b.kill()
    catalogue.inventories.pop("b")
    sealed = b.arena / b.files("seg")[0]
    sealed.rename(sealed.with_suffix(".closed"))
    b.start()

    until(lambda: shard.id in catalogue.held("b"), "sealed after all")
    assert catalogue.held("b")[shard.id].owner == "a"


def test_a_sealed_slot_without_a_sidecar_is_hashed_again(node, catalogue, saved):
    a = node("a")
    reported(catalogue, "a")
    _, _, shard = saved(a)
    a.kill()
    (a.arena / a.files("sum")[0]).unlink()
    a.start()
    until(lambda: catalogue.held("a").get(shard.id), "hashed again")
    assert shard == catalogue.held("a")[shard.id].shard
    assert 1 == len(a.files("sum"))


def test_an_agent_restarted_lets_a_writer_finish(node, catalogue, saved):
    """Interleaving 4: the slot stays valid while its lock is held, and is sealed when closed."""
    a = node("a")
    reported(catalogue, "a")
    t, generation, _ = saved(a)
    lease = until(lambda: a.view(t.session).leases, "a lease")[0]
    until((a.arena / f"{lease.slot}.{lease.incarnation}.open").exists, "open")
    assert "begun" == t.ask("begin", lease.slot, lease.incarnation, 4, generation)
    a.kill()
    a.start()
    until(lambda: len(a.dump()["slots"]) > 0, "adopted")
    assert [f"{lease.slot}.{lease.incarnation}.open"] == a.files("open")
    assert generation == open_session(a, t.session)
    assert "closed" == t.ask("finish")

    until(lambda: {3, 4} == {s.step for s in catalogue.held("a")}, "sealed after all")


def test_an_agent_restarted_frees_what_no_writer_holds(node, catalogue, saved):
    """Interleaving 4, other half: its writer died meanwhile; never torn, never sealed."""
    a = node("a")
    reported(catalogue, "a")
    t, generation, _ = saved(a)
    lease = until(lambda: a.view(t.session).leases, "a lease")[0]
    assert "begun" == t.ask("begin", lease.slot, lease.incarnation, 4, generation)
    a.kill()
    t.end()
    a.start()

    until(lambda: [] == a.files("open") and a.files("free"), "freed")
    assert {3} == {s.step for s in catalogue.held("a")}


def test_an_inventory_refused_as_old_is_sent_again_with_a_higher_incarnation(node, catalogue):
    a = node("a")
    reported(catalogue, "a")
    a.kill()
    from dataclasses import replace

    known = catalogue.inventories["a"]
    future = known.incarnation + 10**18
    catalogue.inventories["a"] = replace(known, incarnation=future)
    a.start()
    until(lambda: catalogue.inventories["a"].incarnation > future, "raised")


def test_levels_reach_the_session(node, catalogue, saved):
    a = node("a")
    reported(catalogue, "a")
    t, generation, _ = saved(a)
    catalogue.set_run(committed=(committed(3, generation, replicated=True),))
    step = until(lambda: [s for s in a.view(t.session).steps if s.replicated], "levels")[0]
    assert (3, True, True) == (step.step, step.sealed, step.local)


class FlippingProxy:
    """Passes bytes on and counts those of answers; flips a bit of the first ``flips`` big ones."""

    def __init__(self, target: str, flips: int = 1) -> None:
        self.flipped = 0
        self.served_bytes = 0
        self._flips = flips
        host, port = target.split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source, sink, flip) -> None:
        seen = 0
        with source, sink, contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                self.served_bytes += len(data) if flip else 0
                if flip and self.flipped < self._flips and seen > 100_000:
                    data[0] ^= 4
                    self.flipped += 1
                seen += len(data)
                sink.sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

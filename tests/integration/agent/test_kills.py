"""Interleaving 14, G8: SIGKILL at any moment, of the writer and of the agent; nothing torn."""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets

from holdfast.core.slot_names import slot_name
from holdfast.format.digest import part_digests
from holdfast.format.header import parse_header
from holdfast.format.segment import header_length
from holdfast.v1 import agent_pb2 as pb
from holdfast_services.agent import sidecar

from .harness import Trainer, committed, open_session, reserve, until

MIB = 1 << 20
LENGTH = 4 * MIB
KILLS = 200
SEED = 20261120
SEAL_S = 0.004


def payload(step: int) -> bytes:
    seed = hashlib.sha256(str(step).encode()).digest()
    return (seed * (LENGTH // len(seed) + 1))[:LENGTH]


def check_sealed(node) -> int:
    """Every sealed file holds one step, whole, as its sidecar says; return how many there are."""
    count = 0
    for name in node.files("seg"):
        try:
            data = (node.arena / name).read_bytes()
            beside = (node.arena / slot_name(name).sidecar_name).read_bytes()
        except FileNotFoundError:
            there = (node.arena / name).exists  # the sidecar of a slot that is freed goes first
            until(lambda there=there: not there(), f"{name} is freed, or has its sidecar")
            continue
        if not (node.arena / name).exists():
            continue
        header = parse_header(data[: header_length(data[:8])], len(data))
        begin = header.data_begin
        assert payload(header.identity.id.step)[begin:] == data[begin:], f"{name} is torn"
        said = sidecar.decode(beside, len(data))
        assert said.shard.id == header.identity.id
        assert said.digests == b"".join(part_digests(memoryview(data))), f"{name} lies"
        count += 1
    return count


def test_two_hundred_kills_leave_no_torn_segment(node, catalogue):
    """A writer is killed while it copies or closes, the agent (each tenth time) as it seals.

    The agent is told of the closed slot and killed within the few milliseconds that hashing,
    sidecar and rename take.
    """
    chance = random.Random(SEED)
    a = node()
    sealed = killed_sealing = 0
    for step in range(1, KILLS + 1):
        t = Trainer(a.arena, secrets.token_hex(16))
        generation = open_session(a, t.session, nonce=secrets.token_bytes(16))
        reserve(a, t.session, LENGTH)
        lease = until(lambda s=t.session: a.view(s).leases, "a lease")[0]
        t.send("write", lease.slot, lease.incarnation, step, generation, LENGTH)
        if step % 10 == 0:
            with contextlib.suppress(OSError):
                t.read()
            told = pb.UpdateRequest(session=t.session, closed_slots=[lease.slot])
            a.call("Update", told)
            t.wait(chance.random() * SEAL_S)
            a.kill()
            killed_sealing += bool(a.files("closed"))
            a.start()
        else:
            t.wait(chance.random() * 0.01)
        t.end()
        until(lambda: not a.files("closed"), "closed slots are dealt with")
        sealed += check_sealed(a)
        catalogue.set_run(
            generation=generation,
            committed=(committed(step, generation),),
            free_before=committed(step, generation).checkpoint,
        )
    assert sealed > KILLS // 20, "the writer was never let through"
    assert killed_sealing, "no agent was killed before it had sealed"

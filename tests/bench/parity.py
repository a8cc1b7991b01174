"""How near the making of a parity element comes to what the library under it does alone."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator

from tests.bench.harness import Record, in_turn, share

from holdfast.format import parity
from holdfast.format.digest import part_digest, part_ranges
from holdfast_services.agent import isal

NAMES = ("parity/encode",)
MEMBERS_COUNT = 4
RUNS = 9


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the fraction of the library's speed over the members' bytes, on one core."""
    length_bytes = (256 << 20) // (16 if quick else 1)
    members = [_filled(length_bytes) for _ in range(MEMBERS_COUNT)]
    total = memoryview(mmap.mmap(-1, length_bytes))
    terms = parity.terms_of_element(0, MEMBERS_COUNT)

    def ours() -> float:
        started_s = time.perf_counter()
        for begin, end in part_ranges(length_bytes):
            pieces = [(term.weight, members[term.number][begin:end]) for term in terms]
            isal.write_sum(total[begin:end], pieces)
            part_digest(total[begin:end])
        return time.perf_counter() - started_s

    def alone() -> float:
        return _encode_alone(members, total, terms)

    ours_s, alone_s = in_turn(ours, alone, runs=RUNS)
    yield share(
        "parity/encode",
        ours_s,
        alone_s,
        peer="ec_encode_data, all members in one call",
        length_bytes=MEMBERS_COUNT * length_bytes,
        note=f"1 element of {MEMBERS_COUNT} members in memory, part by part, digests made",
        share_min=0.6,
    )


def _filled(length_bytes: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, length_bytes))
    block = os.urandom(1 << 20)
    for begin in range(0, length_bytes, len(block)):
        view[begin : begin + len(block)] = block[: length_bytes - begin]
    return view


def _encode_alone(
    members: list[memoryview], total: memoryview, terms: tuple[parity.Term, ...]
) -> float:
    library = isal._library()
    count, length = len(members), len(total)
    table = ctypes.create_string_buffer(isal.TABLE_BYTES * count)
    library.ec_init_tables(count, 1, bytes(term.weight for term in terms), table)
    sources = (ctypes.c_void_p * count)(*map(isal.address, members))
    target = (ctypes.c_void_p * 1)(isal.address(total))
    started_s = time.perf_counter()
    library.ec_encode_data(length, count, 1, table, sources, target)
    return time.perf_counter() - started_s

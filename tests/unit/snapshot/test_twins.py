"""A rank fills slots for copies of another rank's segments, on real files; nobody asks digests."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import pytest
import torch
from tests.unit.state import worlds
from tests.unit.state.test_meshes import planned
from torch import nn

from holdfast.copying.copiers import Copiers
from holdfast.format.header import parse_header
from holdfast.format.segment import header_length
from holdfast.snapshot import twins as twins_rules
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.engine import CopyEngine
from holdfast.snapshot.twins import Twins, has_twins, twins_of
from holdfast.state.capture import Capture

LAYERS = 6


class Rank:
    """One of two ranks of plain DDP: what it trains, and its plan."""

    def __init__(self, become, rank, net):
        become(rank, 2)
        self.net = copy.deepcopy(net)
        self.model = nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step()
        state = {"m": self.model, "o": self.optimizer}
        self.capture = Capture(state, rank=rank, world_size=2)
        self.plan = worlds.plan_of(self.capture)
        assert self.plan.is_current()

    def step(self):
        for p in self.net.parameters():
            p.grad = torch.full_like(p, 0.5)
        self.optimizer.step()


@pytest.fixture
def ranks():
    torch.manual_seed(3)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    with worlds.becoming() as become:
        yield [Rank(become, rank, net) for rank in (0, 1)]


def segment(folder, rank):
    """Return the bytes of what a rank saves now."""
    folder.mkdir(exist_ok=True)
    saver = worlds.Saver(folder)
    path, _ = saver.save(rank.capture)
    assert saver.engine.close(worlds.WAIT_S)
    return path.read_bytes()


def lend(folder, data, rank, slot="s7"):
    """Make a slot that held ``data`` of a rank, and its lease."""
    lease = worlds.make_slot(folder, slot, len(data))
    (folder / f"{slot}.1.open").write_bytes(data)
    return replace(lease, plan_hash=rank.plan.plan_hash)


def filled(folder, slot="s7"):
    return (folder / f"{slot}.1.closed").read_bytes()


def shared(data, rank):
    """Return name -> bytes of a segment's tensors that the rank and its mate have alike."""
    header = parse_header(data[: header_length(data[:8])], len(data))
    names = {spec.fqn for spec in twins_of(rank.plan)}
    return {
        entry.spec.fqn: (entry.begin, entry.end)
        for entry in header.entries
        if entry.spec.fqn in names
    }


def test_what_another_rank_saves_is_filled_in_where_its_segment_has_it(tmp_path, ranks):
    mine, other = ranks
    before = segment(tmp_path / "other", other)
    for rank in ranks:
        rank.step()
    now = segment(tmp_path / "other", other)
    twins = Twins(tmp_path)
    twins.offer([lend(tmp_path, before, other)])

    twins.fill(mine.plan, Copiers(), lambda: False)

    data, places = filled(tmp_path), shared(now, other)
    assert LAYERS < len(places)
    for name, (begin, end) in places.items():
        assert before[begin:end] != now[begin:end] == data[begin:end], name
    assert data[:8] == bytes(8), "nobody takes it for a segment"
    twins.close()


def test_a_rank_without_mates_has_none(ranks, tmp_path):
    net = nn.Linear(4, 4)
    alone = Capture({"m": net}, rank=0, world_size=1)
    apart = Capture({"m": net}, rank=0, world_size=2)  # a module of its own on each rank

    assert [True, True] == [has_twins(rank.plan) for rank in ranks]
    assert not has_twins(worlds.plan_of(alone))
    assert not has_twins(worlds.plan_of(apart))


@pytest.mark.parametrize(("kind", "alike"), [("hsdp", True), ("fsdp", False)])
def test_what_is_cut_over_ranks_has_twins_where_a_mesh_replicates_it(kind, alike):
    """HSDP: ranks 0 and 2 have the same boxes; what of these rank 2 saves rank 0 has, too."""
    with worlds.becoming() as become:
        become(0)
        mine = planned(0, kind)
        become(2)
        other = planned(2, kind)

        assert alike == has_twins(mine)
        saved = {piece.entry.spec for piece in other.deferred if piece.entry.spec.shape}
        assert saved
        assert alike == (saved <= twins_of(mine).keys())
        if not alike:
            assert saved.isdisjoint(twins_of(mine))


def test_a_slot_is_filled_again_under_its_next_lease(tmp_path, ranks):
    """Its places are found once; the mapping stays."""
    mine, other = ranks
    before = segment(tmp_path / "other", other)
    twins = Twins(tmp_path)
    lease = lend(tmp_path, before, other)
    twins.offer([lease])
    twins.fill(mine.plan, Copiers(), lambda: False)
    for rank in ranks:
        rank.step()
    now = segment(tmp_path / "other", other)
    (tmp_path / "s7.1.closed").rename(tmp_path / "s7.2.open")
    twins.offer([replace(lease, incarnation=2)])

    twins.fill(mine.plan, Copiers(), lambda: False)

    data = (tmp_path / "s7.2.closed").read_bytes()
    places = shared(now, other)
    assert all(now[begin:end] == data[begin:end] for begin, end in places.values())
    twins.close()


def test_who_stops_closes_what_was_filled_in_by_then(tmp_path, ranks, monkeypatch):
    """P4: chunk by chunk; the rest is fetched."""
    monkeypatch.setattr(twins_rules, "CHUNK_BYTES_MAX", 256)
    mine, other = ranks
    before = segment(tmp_path / "other", other)
    for rank in ranks:
        rank.step()
    now = segment(tmp_path / "other", other)
    twins = Twins(tmp_path)
    twins.offer([lend(tmp_path, before, other)])
    asked = iter([*[False] * 5, *[True] * 1000])

    twins.fill(mine.plan, Copiers(), lambda: next(asked))

    data, places = filled(tmp_path), shared(now, other)
    right = [now[begin:end] == data[begin:end] for begin, end in places.values()]
    assert 0 < sum(right) < len(right)
    twins.close()


def test_a_slot_whose_head_says_nothing_is_given_back_as_it_is(tmp_path, ranks):
    mine, other = ranks
    data = segment(tmp_path / "other", other)
    twins = Twins(tmp_path)
    torn = lend(tmp_path, bytes(100) + data[100:], other, "s7")
    twins.offer([torn, replace(lend(tmp_path, data, other, "s8"), plan_hash="another")])

    twins.fill(mine.plan, Copiers(), lambda: False)

    assert filled(tmp_path)[100:] == data[100:]
    assert filled(tmp_path, "s8")[8:] == data[8:]
    twins.close()


def test_what_was_freed_or_is_of_another_size_now_is_left_out(tmp_path, ranks):
    """Whoever reads freed memory ends the process."""
    mine, other = ranks
    data = segment(tmp_path / "other", other)
    twins = Twins(tmp_path)
    lease = lend(tmp_path, data, other)
    twins.offer([lease])
    twins.fill(mine.plan, Copiers(), lambda: False)
    with (tmp_path / "s7.1.closed").open("r+b") as file:
        file.write(data)
    (tmp_path / "s7.1.closed").rename(tmp_path / "s7.2.open")
    twins.offer([replace(lease, incarnation=2)])
    mine.net[0].weight.data = mine.net[0].weight.data[:2]
    mine.net[1].weight.untyped_storage().resize_(0)

    twins.fill(mine.plan, Copiers(), lambda: False)

    assert (tmp_path / "s7.2.closed").read_bytes()[8:] == data[8:], "all of them in one chunk"
    twins.close()


def test_a_slot_that_was_taken_back_is_nobodys_failure(tmp_path, ranks, caplog):
    mine, other = ranks
    data = segment(tmp_path / "other", other)
    twins = Twins(tmp_path)
    twins.offer([lend(tmp_path, data, other)])
    (tmp_path / "s7.1.open").unlink()

    twins.fill(mine.plan, Copiers(), lambda: False)
    twins.fill(mine.plan, Copiers(), lambda: False)

    assert 1 == caplog.text.count("is not filled for a copy")
    twins.close()


@pytest.mark.parametrize("waits", ["gate", "next save"])
def test_nobody_waits_for_a_filling_longer_than_for_a_chunk(tmp_path, ranks, waits):
    """P4: an optimizer that steps, and the next save, stop it."""
    mine, _ = ranks
    begun, stopped = threading.Event(), threading.Event()

    class Endless(Twins):
        def fill(self, plan, copiers, stops):
            begun.set()
            while not stops():
                pass
            stopped.set()

    ended = threading.Event()
    engine = CopyEngine(lambda _: ended.set(), Endless(tmp_path))
    lease = worlds.make_slot(tmp_path, "s1", mine.plan.length_bytes)
    buffer = SlotBuffer.open(tmp_path, lease)
    engine.begin(mine.plan, buffer, step=1, generation=1)
    assert begun.wait(worlds.WAIT_S)
    assert engine.busy

    wait = engine.let_pass if waits == "gate" else engine.wait
    assert wait(worlds.WAIT_S)

    assert stopped.is_set()
    assert ended.wait(worlds.WAIT_S)
    assert engine.close(worlds.WAIT_S)
    buffer.drop()


def test_an_error_of_the_filling_costs_no_save(tmp_path, ranks, caplog):
    mine, _ = ranks

    class Failing(Twins):
        def fill(self, plan, copiers, stops):
            raise ZeroDivisionError

    saved = []
    ended = threading.Event()
    engine = CopyEngine(
        lambda snapshot: (saved.append(snapshot.copied), ended.set()), Failing(tmp_path)
    )
    lease = worlds.make_slot(tmp_path, "s1", mine.plan.length_bytes)
    buffer = SlotBuffer.open(tmp_path, lease)
    engine.begin(mine.plan, buffer, step=1, generation=1)

    assert ended.wait(worlds.WAIT_S)
    assert saved == [True]
    assert "are not filled at step 1" in caplog.text
    assert engine.close(worlds.WAIT_S)
    buffer.drop()

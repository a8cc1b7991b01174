"""What a rank names of a checkpoint whose tensors several ranks hold: segments and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.needs import HEADS_BYTES_MAX, Head, Needs, ShardNeed
from holdfast.errors import UnavailableError
from holdfast.format import byte_ranges
from holdfast.format.boxes import Box, whole
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast.rpc.channel import MESSAGE_BYTES_MAX
from holdfast.state.boxes_here import LocalBoxes
from holdfast.state.survey import CapturedTensor, Home
from holdfast.training import restore_needs
from holdfast.training.headers import Headers
from holdfast.training.restore_needs import of_boxes

SAVED = 4
ROWS, COLUMNS = 8, 3
KEY = ShardId(RunId("r"), Step(7), Generation(1), Rank(0)).checkpoint
STATE = "optimizer.state.model.w."
NOTHING = Needs(checkpoint=KEY)
WHOLE = Needs(checkpoint=KEY, whole=True)


@pytest.fixture(autouse=True)
def parts_of_a_byte(monkeypatch):
    """What is named is told to the byte."""
    monkeypatch.setattr(byte_ranges, "PART_BYTES", 1)


def rows(begin: int, end: int) -> Box:
    return Box((begin, 0), (end - begin, COLUMNS))


def template(
    rank: int,
    world_size: int = SAVED,
    lacking: str = "",
    more: tuple[TensorSpec, ...] = (),
    place: int | None = None,
):
    """The header of one rank of an FSDP job: two rows of each tensor, its scalar, its text."""
    place = rank if place is None else place
    shape, box = (ROWS, COLUMNS), rows(2 * place, 2 * place + 2)
    specs = [
        TensorSpec(fqn="model.w", dtype="F32", shape=shape, box=box),
        TensorSpec(fqn=f"{STATE}exp_avg", dtype="F32", shape=shape, box=box),
        TensorSpec(fqn=f"{STATE}step", dtype="F32", shape=(), box=whole(())),
        TensorSpec(fqn=f"rank.{rank}.extra", dtype="F32", shape=(5,), box=whole((5,))),
        TensorSpec(fqn=f"holdfast.rank.{rank}", dtype="U8", shape=(64,), box=whole((64,))),
    ]
    specs = [*(spec for spec in specs if spec.fqn != lacking), *more]
    return header_template(identity(rank, world_size), specs)


def identity(rank: int, world_size: int = SAVED) -> SegmentIdentity:
    return SegmentIdentity(
        id=ShardId(KEY.run, KEY.step, KEY.generation, Rank(rank)), job="j",
        world_size=world_size, plan_hash="0" * 32,
    )  # fmt: skip


def head(rank: int, of: int | None = None, **fields) -> Head:
    made = template(rank if of is None else of, **fields)
    data = made.fill(step=KEY.step, generation=KEY.generation, parent=None)
    return Head(rank=rank, length_bytes=made.length_bytes, data=data)


def mate(rank: int, saved: TensorSpec) -> Head:
    """The head of a rank that has saved this, and its text, and nothing else."""
    text = TensorSpec(fqn=f"holdfast.rank.{rank}", dtype="U8", shape=(64,), box=whole((64,)))
    made = header_template(identity(rank), [saved, text])
    data = made.fill(step=KEY.step, generation=KEY.generation, parent=None)
    return Head(rank=rank, length_bytes=made.length_bytes, data=data)


class Agent:
    """Answers with the heads that it has, so many at a time."""

    def __init__(self, *heads: Head, at_a_time: int = SAVED) -> None:
        self.asked: list[list[int]] = []
        self._heads, self._most = heads, at_a_time

    def __call__(self, checkpoint, ranks):
        assert checkpoint == KEY
        self.asked.append(list(ranks))
        return [h for h in self._heads if h.rank in ranks][: self._most]


def everybody(**more) -> Agent:
    return Agent(*map(head, range(SAVED)), **more)


def held(begin: int, end: int, holders=(0,), mesh=(0, 1), shape=(ROWS, COLUMNS)) -> LocalBoxes:
    """A rank that holds these rows of the model; its optimizer has not made its state yet."""
    captured = CapturedTensor(
        "model.w", torch.zeros(end - begin, COLUMNS), Home.HOLDERS, True, shape,
        rows(begin, end), holders, mesh,
    )  # fmt: skip
    return LocalBoxes({"model.w": captured}, {})


def named(find, boxes, *, source=0, world_size=2, only=None) -> Needs:
    needs, _ = of_boxes(
        NOTHING, source, boxes, only, Headers(find), saved=SAVED, world_size=world_size
    )
    return needs


def spans(needs: Needs, rank: int) -> set[str]:
    """Return the names of those tensors of a rank's segment of which any byte is named."""
    [need] = [need for need in needs.shards if need.rank == rank]
    return {
        entry.spec.fqn
        for entry in template(rank).entries
        if any(part.begin < entry.end and entry.begin < part.end for part in need.ranges)
    }


def test_half_as_many_ranks_need_the_segments_that_their_rows_are_in():
    """F80: and of rank 0 its text, whose seed the random streams follow from."""
    needs = named(everybody(), held(4, 8, holders=(1,)), source=1)

    assert [0, 1, 2, 3] == [need.rank for need in needs.shards]
    both = {"model.w", f"{STATE}exp_avg"}
    assert both == spans(needs, 2) == spans(needs, 3)
    assert {"holdfast.rank.0", f"{STATE}step"} == spans(needs, 0)
    assert {"holdfast.rank.1", "rank.1.extra"} == spans(needs, 1)


def test_what_a_group_of_other_ranks_saved_under_the_name_is_looked_for_in_all_heads():
    """Each pair of ranks had a tensor of its own: rank 0's group now is not the one that was."""

    def of_pair(rank: int) -> Head:
        half = rows(4 * (rank % 2), 4 * (rank % 2) + 4)
        first = rank - rank % 2
        saved = TensorSpec(
            fqn=f"rank.{first}.model.w", dtype="F32", shape=(ROWS, COLUMNS), box=half
        )
        return mate(rank, saved)

    agent = Agent(*map(of_pair, range(SAVED)))

    needs = named(agent, held(0, 4))

    assert agent.asked == [[0, 1], [0, 1, 2, 3]]
    assert {need.rank for need in needs.shards} == {0, 2}


def test_of_more_ranks_one_asks_those_who_had_its_rows_and_whose_text_it_reads():
    """F80: not everybody, however many there were: a limit of all heads says nothing of these."""
    agent = everybody()

    needs, of_all = of_boxes(
        NOTHING, 1, held(7, 8, holders=(7,), mesh=range(8)), None, Headers(agent),
        saved=SAVED, world_size=8,
    )  # fmt: skip

    assert [[0, 1, 3]] == agent.asked
    assert not of_all
    assert [0, 1, 3] == [need.rank for need in needs.shards]
    assert {"model.w", f"{STATE}exp_avg"} == spans(needs, 3)
    assert {"holdfast.rank.0", f"{STATE}step"} == spans(needs, 0)
    assert {"holdfast.rank.1", "rank.1.extra"} == spans(needs, 1)


def test_of_too_many_ranks_those_that_had_its_rows_are_asked_all_the_same(monkeypatch):
    monkeypatch.setattr(restore_needs, "HEADS_COUNT_MAX", SAVED - 1)
    agent = everybody()

    assert not named(agent, held(0, 4)).whole
    assert [[0, 1]] == agent.asked


@pytest.mark.parametrize("more", [{"sections": ["model"]}, {"elsewhere": ["optimizer"]}])
def test_where_others_have_tensors_alone_all_heads_are_asked_for(more):
    """What of a section or an optimizer is on one rank, no cut of rows tells."""
    agent = everybody()

    named(agent, replace(held(0, 2), **more))

    assert [[0, 1, 2, 3]] == agent.asked


def test_rows_that_were_cut_otherwise_are_looked_for_in_all_heads():
    """Rank 3 had none of them, as its own head says."""
    agent = Agent(*(head(rank, place=(rank + 1) % SAVED) for rank in range(SAVED)))

    needs, of_all = of_boxes(
        NOTHING, 1, held(7, 8, holders=(7,), mesh=range(8)), None, Headers(agent),
        saved=SAVED, world_size=8,
    )  # fmt: skip

    assert [[0, 1, 3], [0, 1, 2, 3]] == agent.asked
    assert of_all
    assert 2 in [need.rank for need in needs.shards]


def test_a_part_of_a_box_is_named_by_the_bytes_of_its_rows():
    needs = named(everybody(), held(3, 5))

    [second] = [need for need in needs.shards if need.rank == 1]
    entry = next(e for e in template(1).entries if e.spec.fqn == "model.w")
    row_bytes = 4 * COLUMNS
    assert any((entry.begin + row_bytes, entry.end) == (r.begin, r.end) for r in second.ranges)


def test_on_the_same_mesh_one_head_tells_all():
    """A thousand ranks do not ask for a thousand heads each; nothing of another's is fetched."""
    agent = everybody()

    needs = named(agent, held(4, 6, holders=(2,)), source=2, world_size=SAVED)

    assert [[2]] == agent.asked
    assert [2] == [need.rank for need in needs.shards]
    assert len(spans(needs, 2)) == len(template(2).entries)


def test_other_rows_than_it_saved_are_looked_for_in_all_heads():
    agent = everybody(at_a_time=2)

    needs = named(agent, held(2, 4), world_size=SAVED)

    assert [[0], [0, 1, 2, 3], [2, 3]] == agent.asked  # two were not in the second answer
    assert {"model.w", f"{STATE}exp_avg", f"{STATE}step"} >= spans(needs, 1) >= {"model.w"}


def test_a_box_that_others_hold_too_may_be_in_their_segments_and_so_may_its_state():
    """HSDP: this rank has saved the parameter, another one its moment."""
    agent = Agent(head(0, lacking=f"{STATE}exp_avg"), *map(head, (1, 2, 3)))

    named(agent, held(0, 2, holders=(0, 2)), world_size=SAVED)

    assert [[0, 2], [0, 1, 2, 3]] == agent.asked


def test_on_the_same_mesh_of_copies_the_heads_of_its_mates_are_enough(monkeypatch):
    """Defect of an attack: HSDP over 513 ranks fetched whole checkpoints on its own mesh."""
    monkeypatch.setattr(restore_needs, "HEADS_COUNT_MAX", SAVED - 1)
    moment = TensorSpec(fqn=f"{STATE}exp_avg", dtype="F32", shape=(ROWS, COLUMNS), box=rows(0, 2))
    agent = Agent(head(0, lacking=f"{STATE}exp_avg"), mate(2, moment))

    needs = named(agent, held(0, 2, holders=(0, 2)), world_size=SAVED)

    assert [[0, 2]] == agent.asked
    assert not needs.whole


def test_what_all_ranks_share_is_looked_for_in_all_heads_and_the_order_of_ddp_with_rank_0():
    """Defect of an attack: DDP beside FSDP2 fetched the whole checkpoint on the same ranks."""
    boxes = held(2, 4, holders=(1,))
    shared = CapturedTensor(
        "disc.b", torch.zeros(2), Home.SHARED, False, shape=(2,), box=whole((2,))
    )
    saved = TensorSpec(fqn="disc.b", dtype="F32", shape=(2,), box=whole((2,)))
    heads = [head(0), head(1), head(2), head(3, more=(saved,))]

    needs = named(
        Agent(*heads), LocalBoxes({**boxes.tensors, "disc.b": shared}, {}), source=1,
        world_size=SAVED,
    )  # fmt: skip

    assert [0, 1, 3] == [need.rank for need in needs.shards]
    assert "holdfast.rank.0" in spans(needs, 0)


def test_in_another_world_size_the_text_of_rank_0_is_elsewhere():
    needs = named(everybody(), held(2, 4, holders=(1,)), source=1)

    assert "holdfast.rank.0" in spans(needs, 0)


def test_a_tensor_that_its_own_header_lacks_is_looked_for_in_all():
    agent = Agent(head(0, lacking="model.w"), *map(head, (1, 2, 3)))

    named(agent, held(2, 4), world_size=SAVED)

    assert [0, 1, 2, 3] in agent.asked


def test_what_its_mesh_has_saved_as_its_own_is_named_by_the_first_rank_of_it():
    """A layer beside the plan of tensor parallelism: of rank 0 and 2 here, of 1 and 3 there."""
    norm = [
        TensorSpec(fqn=f"rank.{first}.model.w", dtype="F32", shape=(8, 3), box=rows(0, 8))
        for first in (0, 1)
    ]
    heads = [
        head(rank, lacking="model.w", more=(norm[rank],) if rank < 2 else ())
        for rank in range(SAVED)
    ]
    find = Agent(*heads)

    needs = named(find, held(0, 8, holders=(0, 2), mesh=(0, 2)), source=2, world_size=SAVED)

    entry = next(
        e
        for e in template(0, lacking="model.w", more=(norm[0],)).entries
        if e.spec.fqn in norm[0].fqn
    )
    [first] = [need for need in needs.shards if need.rank == 0]
    assert any(part.begin <= entry.begin and entry.end <= part.end for part in first.ranges)


@pytest.mark.parametrize(
    ("only", "names"),
    [(["model"], {"model.w"}), (["optimizer"], {f"{STATE}exp_avg", f"{STATE}step"})],
)
def test_only_what_is_under_the_names_asked_for_is_named(only, names):
    needs = named(everybody(), held(0, 2), world_size=SAVED, only=only)

    assert names | {"holdfast.rank.0"} == spans(needs, 0)


@pytest.mark.parametrize("optimizer", ["o", "train.state.o"])
@pytest.mark.parametrize("parameter", ["model.w", "model.state.w", "train.state.model.w"])
def test_state_to_come_has_the_box_of_its_parameter_whatever_both_are_called(optimizer, parameter):
    """Defect of an attack: below a key "state" the state of all ranks was named."""
    captured = held(2, 4).tensors["model.w"]
    boxes = LocalBoxes({parameter: captured}, {})

    assert boxes.find(f"{optimizer}.state.{parameter}.exp_avg") is captured


def test_what_no_rank_here_has_is_named_whole_so_that_a_strict_restore_sees_it():
    boxes = held(0, 2)
    agent = everybody()

    needs = named(agent, LocalBoxes({"other": boxes.tensors["model.w"]}, {}))

    assert all("model.w" in spans(needs, rank) for rank in range(SAVED))


def test_the_head_of_as_many_tensors_as_a_rank_may_have_fits_into_an_answer():
    """Defect of an attack: 10^5 names of 150 letters did not, and all of it was named."""
    specs = [
        TensorSpec(
            fqn=f"{at:0150}", dtype="F32", shape=(8192, 8192), box=Box((1024, 0), (64, 8192))
        )
        for at in range(1000)
    ]
    made = header_template(identity(0), specs)

    assert 32 << 20 < 100 * len(made.data) <= HEADS_BYTES_MAX < MESSAGE_BYTES_MAX - (1 << 20)


def unavailable(checkpoint, ranks):
    raise UnavailableError("the agent does not answer")


@pytest.mark.parametrize(
    "find",
    [
        Agent(), Agent(head(0), head(1)), unavailable,
        Agent(head(0, of=1), head(1), head(2), head(3)),
        Agent(replace(head(0), data=b"junk"), head(1), head(2), head(3)),
    ],
    ids=["nobody has a head", "two are not to be had", "no answer", "another's head", "no head"],
)  # fmt: skip
def test_all_is_named_if_the_heads_do_not_tell(find):
    """A head is not verified: a false one costs bytes, never a wrong tensor."""
    assert named(find, held(0, 8)).whole


def test_all_is_named_of_a_checkpoint_of_too_many_ranks(monkeypatch):
    monkeypatch.setattr(restore_needs, "HEADS_COUNT_MAX", SAVED - 1)
    agent = everybody()

    assert named(agent, held(0, 4, holders=(0, 1))).whole
    assert [] == agent.asked


def test_of_as_many_ranks_on_the_same_mesh_one_head_is_enough(monkeypatch):
    """The limit is one of asking everybody; here nobody else is asked."""
    monkeypatch.setattr(restore_needs, "HEADS_COUNT_MAX", SAVED - 1)
    agent = everybody()

    needs = named(agent, held(4, 6, holders=(2,)), source=2, world_size=SAVED)

    assert [[2]] == agent.asked
    assert [2] == [need.rank for need in needs.shards]
    assert not needs.whole


def test_what_is_needed_whole_stays_so():
    agent = everybody()

    needs, _ = of_boxes(WHOLE, 0, held(0, 4), None, Headers(agent), saved=SAVED, world_size=2)

    assert (needs, []) == (WHOLE, agent.asked)
    assert ShardNeed(rank=0).ranges == ()

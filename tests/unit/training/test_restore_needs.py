"""Which bytes a rank names for ``only=``, from a header that nobody has verified."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.needs import RANGES_COUNT_MAX, Head, Needs, ShardNeed
from holdfast.errors import UnavailableError
from holdfast.format import byte_ranges
from holdfast.format.boxes import whole
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast.training.headers import Headers
from holdfast.training.restore_needs import of_names

OWN = ShardId(RunId("r"), Step(7), Generation(1), Rank(1))
KEY = OWN.checkpoint
ALL = Needs(checkpoint=KEY, shards=(ShardNeed(rank=0), ShardNeed(rank=1)))
SHAPES = {
    "rank.1.model.w": (1000,),
    "rank.1.model.empty": (0,),
    "rank.1.model2": (300,),
    "rank.1.count": (),
    "shared.model": (50,),
    "holdfast.rank.1": (20,),
}


def template(shard=OWN, shapes=SHAPES):
    specs = [TensorSpec(fqn=n, dtype="U8", shape=s, box=whole(s)) for n, s in shapes.items()]
    identity = SegmentIdentity(id=shard, job="j", world_size=2, plan_hash="0" * 32, parent=None)
    return header_template(identity, specs)


def head(shard=OWN, **fields):
    made = template(shard, **fields)
    data = made.fill(step=shard.step, generation=shard.generation, parent=None)
    return Head(rank=1, length_bytes=made.length_bytes, data=data)


def named(only, *heads):
    return of_names(ALL, 1, only, Headers(lambda checkpoint, ranks: heads))


@pytest.fixture(autouse=True)
def parts_of_a_byte(monkeypatch):
    """What is named is told to the byte."""
    monkeypatch.setattr(byte_ranges, "PART_BYTES", 1)


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["model"], ["rank.1.model.w"]),
        (["model2"], ["rank.1.model2"]),
        (["model", "count"], ["rank.1.model.w", "rank.1.count"]),
        (["model.empty"], []),
        (["shared"], ["shared.model"]),
        ([], []),
    ],
)
def test_the_header_the_ranks_text_and_what_is_under_the_names_are_named(only, names):
    made = template()
    ends = {entry.spec.fqn: (entry.begin, entry.end) for entry in made.entries}
    wanted = {at for name in [*names, "holdfast.rank.1"] for at in range(*ends[name])}
    needs = named(only, head())
    [need] = needs.shards

    assert (need.rank, need.volume) == (1, 0)
    found = {at for part in need.ranges for at in range(part.begin, part.end)}
    assert found == wanted | set(range(len(made.data)))


FALSE = {
    "none": (),
    "no header": (Head(rank=1, length_bytes=64, data=b"no header" * 9),),
    "cut off": (replace(head(), data=head().data[:-1]),),
    "of another length": (replace(head(), length_bytes=1 << 60),),
    "of another rank": (head(replace(OWN, rank=Rank(0))),),
    "of another step": (head(replace(OWN, step=Step(6))),),
    "of another volume": (head(replace(OWN, volume=1)),),
    "without the rank's text": (head(shapes={"rank.1.model.w": (5,)}),),
    "empty": (head(shapes={}),),
}


@pytest.mark.parametrize("heads", FALSE.values(), ids=FALSE)
def test_with_a_false_header_all_that_the_rank_needs_is_named(heads):
    """It must not end the restore, nor have the rank wait for a shard that there is not."""
    assert named(["model"], *heads) == ALL


def test_more_ranges_than_an_agent_takes_are_not_named():
    """It would refuse all that this rank says from then on."""
    count = RANGES_COUNT_MAX + 1
    names = (f"rank.1.{kind}.{at}" for at in range(count) for kind in ("model", "other"))
    many = head(shapes=dict.fromkeys([*names, "holdfast.rank.1"], (1,)))

    assert named(["model"], many) == ALL


def test_without_an_answer_all_that_the_rank_needs_is_named():
    def find(checkpoint, ranks):
        raise UnavailableError("the agent does not answer")

    assert of_names(ALL, 1, ["model"], Headers(find)) == ALL


def test_what_is_needed_whole_stays_so():
    whole_needs = replace(ALL, whole=True)

    headers = Headers(lambda *_: [head()])

    assert of_names(whole_needs, 1, ["model"], headers) == whole_needs

"""Headers are parsed once, however often a restore meets their bytes."""

import pytest

from holdfast.core.ids import CheckpointId, Rank, RunId, ShardId
from holdfast.core.needs import Head
from holdfast.errors import ManifestError, NotReadyError
from holdfast.format.boxes import whole
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast.training.headers import Headers

RUN = RunId("0" * 32)
STEP = CheckpointId(RUN, 7, 1)


def head(rank, *, name="w", step=STEP):
    spec = TensorSpec(fqn=name, dtype="U8", shape=(8,), box=whole((8,)))
    shard = ShardId(step.run, step.step, step.generation, Rank(rank))
    identity = SegmentIdentity(id=shard, job="j", world_size=2, plan_hash="0" * 32, parent=None)
    made = header_template(identity, [spec])
    data = made.fill(step=shard.step, generation=shard.generation, parent=None)
    return Head(rank=rank, length_bytes=made.length_bytes, data=data)


def test_what_was_asked_for_is_parsed_once():
    known = head(0)
    headers = Headers(lambda *_: [known])

    [first] = headers.of(STEP, [0])

    assert headers.parse(memoryview(known.data + bytes(8)), known.length_bytes) is first


def test_other_bytes_are_parsed_anew():
    headers = Headers(lambda *_: [head(0)])
    headers.of(STEP, [0])
    other = head(0, name="v")

    found = headers.parse(other.data, other.length_bytes)

    assert [entry.spec.fqn for entry in found.entries] == ["v"]


def test_a_known_header_in_a_file_of_another_length_is_refused():
    known = head(0)
    headers = Headers(lambda *_: [known])
    headers.of(STEP, [0])

    with pytest.raises(ManifestError, match="tensors end at"):
        headers.parse(known.data, known.length_bytes + 64)


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, (1 << 40).to_bytes(8, "little"), b"\x08" * 8])
def test_what_is_no_header_is_refused(data):
    with pytest.raises(ManifestError):
        Headers(lambda *_: []).parse(data, 1 << 20)


def test_a_head_that_is_cut_short_is_refused():
    known = head(0)

    with pytest.raises(ManifestError):
        Headers(lambda *_: []).parse(known.data[:-1], known.length_bytes)


def test_those_that_are_known_are_not_taken_for_others():
    """Each is looked at for whose it is, known or not."""
    headers = Headers(lambda *_: [head(0)])
    headers.of(STEP, [0])
    later = CheckpointId(RUN, 8, 1)

    with pytest.raises(ManifestError, match="is that of"):
        headers.of(later, [0])


def test_without_an_answer_it_is_said_how_many_there_are():
    answers = [[head(0)], []]
    headers = Headers(lambda *_: answers.pop(0))

    with pytest.raises(NotReadyError, match="1 of 2 heads"):
        headers.of(STEP, [0, 1])


def test_what_is_forgotten_is_parsed_anew():
    known = head(0)
    headers = Headers(lambda *_: [known])
    [first] = headers.of(STEP, [0])

    headers.forget()

    assert headers.parse(known.data, known.length_bytes) is not first

"""``core.segment``: laying out, filling in, reading back (F32, F33, P7)."""

import json

import pytest
from safetensors import safe_open

from holdfast.core.ids import ShardId
from holdfast.errors import InvalidRequestError, ManifestError
from holdfast.format.boxes import Box, whole
from holdfast.format.header import parse_header
from holdfast.format.segment import (
    ALIGNMENT_BYTES,
    SegmentIdentity,
    TensorSpec,
    blob_spec,
    header_length,
    header_template,
)

IDENTITY = SegmentIdentity(
    id=ShardId("r7", 1200, 3, 1), job="team/gpt", world_size=2, plan_hash="9f2c"
)


def spec(fqn="w", dtype="F32", shape=(4, 6), box=None):
    return TensorSpec(fqn=fqn, dtype=dtype, shape=shape, box=box or whole(shape))


def test_a_header_says_what_was_laid_out():
    specs = [spec("half", "BF16"), spec("w", box=Box((2, 0), (2, 6))), blob_spec("blob", 9)]
    template = header_template(IDENTITY, specs)
    header = parse_header(template.data, template.length_bytes)

    assert IDENTITY == header.identity
    assert template.entries == header.entries
    assert ["w", "half", "blob"] == [entry.spec.fqn for entry in header.entries]
    assert {0} == {entry.begin % 2 for entry in header.entries}


def test_filling_in_moves_nothing():
    """Architecture 4.3: only fixed-width digits change from save to save."""
    template = header_template(IDENTITY, [spec()])
    filled = template.fill(step=10**15 - 1, generation=10**10 - 1, parent=(5, 2))
    header = parse_header(filled, template.length_bytes)

    assert len(template.data) == len(filled)
    assert ShardId("r7", 10**15 - 1, 10**10 - 1, 1) == header.identity.id
    assert (5, 2) == header.identity.parent
    assert template.entries == header.entries
    assert template.data == template.fill(step=1200, generation=3, parent=None)


@pytest.mark.parametrize(
    "digits",
    [{"step": 10**15}, {"step": -1}, {"generation": 10**10}, {"parent": (0, -1)}],
)
def test_numbers_that_do_not_fit_are_refused(digits):
    template = header_template(IDENTITY, [spec()])
    with pytest.raises(InvalidRequestError, match="does not fit"):
        template.fill(**{"step": 1, "generation": 1, "parent": None, **digits})


def test_nothing_in_a_name_confuses_the_spots():
    """A job or tensor that spells a key of the header leaves the digits where they are."""
    identity = SegmentIdentity(
        id=ShardId("r", 1, 1, 0), job="holdfast.step", world_size=1, plan_hash='"holdfast.step":"'
    )
    template = header_template(identity, [spec('"holdfast.step":"1"')])

    assert (
        77
        == parse_header(
            template.fill(step=77, generation=1, parent=None), template.length_bytes
        ).identity.id.step
    )


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,) * 64])
def test_scalars_empty_and_flat_tensors_have_a_place(shape):
    """F39."""
    template = header_template(IDENTITY, [spec("odd", shape=shape), spec("w")])

    assert template.entries == parse_header(template.data, template.length_bytes).entries


def test_an_empty_segment_is_one():
    template = header_template(IDENTITY, [])

    assert len(template.data) == template.length_bytes
    assert () == parse_header(template.data, template.length_bytes).entries


def test_data_begin_aligned():
    for length in range(1, 70):
        template = header_template(IDENTITY, [spec("n" * length)])
        assert 0 == len(template.data) % ALIGNMENT_BYTES
        assert len(template.data) == header_length(template.data)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([spec(), spec()], "stands twice"),
        ([spec("")], "not usable"),
        ([spec("__metadata__")], "not usable"),
        ([spec("n" * 1025)], "not usable"),
        ([spec("a\nb")], "not usable"),
        ([spec("\ud800")], "not usable"),
        ([spec(dtype="C128")], "unknown dtype"),
        ([spec(shape=(1,) * 65)], "65 dims"),
        ([spec(box=Box((3, 0), (2, 6)))], "outside its shape"),
        ([spec(box=Box((0, 0, 0), (2, 1, 1)))], "outside its shape"),
        ([spec(box=Box((23,), (2,)))], "outside its shape"),
    ],
)
def test_what_no_reader_would_take_is_not_written(specs, message):
    """F38: the plan is validated before a byte is copied."""
    with pytest.raises(InvalidRequestError, match=message):
        header_template(IDENTITY, specs)


@pytest.mark.parametrize("plan_hash", ["", "x" * 65, "a\n"])
def test_a_plan_hash_is_short_and_printable(plan_hash):
    identity = SegmentIdentity(id=IDENTITY.id, job="j", world_size=1, plan_hash=plan_hash)
    with pytest.raises(InvalidRequestError, match="plan hash"):
        header_template(identity, [])


def test_a_segment_of_another_length_is_refused():
    """F70: a truncated copy is never served."""
    template = header_template(IDENTITY, [spec()])
    for length in (0, 8, len(template.data), template.length_bytes - 1, template.length_bytes + 1):
        with pytest.raises(ManifestError):
            parse_header(template.data, length)


def test_safetensors_itself_reads_a_segment(tmp_path):
    """P7, F32: any safetensors reader opens it, with every tensor in its place."""
    specs = [blob_spec("blob", 3), spec("w", shape=(2, 2)), spec("s", "I64", ())]
    template = header_template(IDENTITY, specs)
    path = tmp_path / "x.safetensors"
    path.write_bytes(template.data + bytes(range(template.length_bytes - len(template.data))))
    with safe_open(path, framework="np") as opened:
        assert {"blob", "w", "s"} == set(opened.keys())
        assert [24, 25, 26] == opened.get_tensor("blob").tolist()
        assert 0x0706050403020100 == opened.get_tensor("s").item()
        sharding = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
    assert {"saved_offsets": [0, 0], "global_shape": [2, 2]} == sharding["w"]

"""Format v1 byte for byte: what was written once stays readable and is written the same (G15)."""

from pathlib import Path

from holdfast.core.ids import ShardId
from holdfast.format.boxes import Box, whole
from holdfast.format.header import parse_header
from holdfast.format.segment import SegmentIdentity, TensorSpec, blob_spec, header_template

GOLDEN = Path(__file__).parent / "segment-v1.bin"
LENGTH_BYTES = 4 * 3 * 8 + 2 * 6 * 4 + 0 + 8 + 5 * 2 + 33
FIX = "format v1 is frozen: undo the change, or make it format 2 and keep reading 1"

IDENTITY = SegmentIdentity(
    id=ShardId("r7c0ffee", 1200, 3, 1),
    job="team/gpt-small",
    world_size=2,
    plan_hash="9f2c11ab",
    parent=(1100, 2),
)
SPECS = [
    TensorSpec(fqn="model.wq", dtype="F32", shape=(4, 6), box=Box((2, 0), (2, 6))),
    TensorSpec(fqn="model.b", dtype="BF16", shape=(5,), box=whole((5,))),
    TensorSpec(fqn="optimizer.exp_avg", dtype="F64", shape=(4, 3), box=whole((4, 3))),
    TensorSpec(fqn="optimizer.step", dtype="I64", shape=(), box=whole(())),
    TensorSpec(fqn="empty", dtype="F32", shape=(4, 0), box=Box((2, 0), (2, 0))),
    blob_spec("holdfast.state", 33),
]


def test_a_segment_is_written_as_it_always_was():
    template = header_template(IDENTITY, SPECS)

    assert GOLDEN.read_bytes() == template.data, FIX


def test_a_segment_of_format_1_is_read():
    golden = GOLDEN.read_bytes()
    header = parse_header(golden, len(golden) + LENGTH_BYTES)
    by_name = {entry.spec.fqn: entry.spec for entry in header.entries}

    assert IDENTITY == header.identity, FIX
    assert {spec.fqn: spec for spec in SPECS} == by_name, FIX

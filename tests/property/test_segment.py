"""Segment headers: round trips, and mutations that are refused or harmless (P9, F70)."""

import json
import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.ids import ShardId
from holdfast.errors import CorruptionError, UnsupportedFormatError
from holdfast.format.boxes import Box
from holdfast.format.header import parse_header
from holdfast.format.segment import ITEM_BYTES, SegmentIdentity, TensorSpec, header_template

REFUSED = (CorruptionError, UnsupportedFormatError)
names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)


@st.composite
def specs(draw):
    dims = draw(st.integers(0, 3))
    sides = st.lists(st.integers(0, 5), min_size=dims, max_size=dims)
    offsets, lengths, rest = draw(sides), draw(sides), draw(sides)
    return TensorSpec(
        fqn=draw(names.filter(lambda name: name != "__metadata__")),
        dtype=draw(st.sampled_from(sorted(ITEM_BYTES))),
        shape=tuple(map(sum, zip(offsets, lengths, rest, strict=True))),
        box=Box(tuple(offsets), tuple(lengths)),
    )


identities = st.builds(
    SegmentIdentity,
    id=st.builds(
        ShardId,
        st.text("abc019", min_size=1, max_size=32),
        st.integers(0, 10**15 - 1),
        st.integers(0, 10**10 - 1),
        st.integers(0, 10**6),
        st.integers(0, 99),
    ),
    job=st.sampled_from(["a", "team/gpt-2", "A.b_c"]),
    world_size=st.integers(1, 10**6),
    plan_hash=st.text("0123456789abcdef", min_size=1, max_size=64),
    parent=st.none() | st.tuples(st.integers(0, 10**15 - 1), st.integers(0, 10**10 - 1)),
)
layouts = st.lists(specs(), max_size=6, unique_by=lambda spec: spec.fqn)


@given(identities, layouts)
def test_a_header_is_read_as_it_was_written(identity, layout):
    template = header_template(identity, layout)
    header = parse_header(template.data, template.length_bytes)

    assert identity == header.identity
    assert sorted(template.entries, key=lambda entry: (entry.begin, entry.end)) == list(
        header.entries
    )
    assert template.data == template.fill(
        step=identity.id.step, generation=identity.id.generation, parent=identity.parent
    )


def is_sound(header, length_bytes):
    """What a reader relies on, whatever the header says."""
    at = header.data_begin
    for entry in header.entries:
        assert at == entry.begin
        assert entry.spec.length_bytes == entry.end - entry.begin
        assert 0 == entry.begin % ITEM_BYTES[entry.spec.dtype]
        stops = zip(entry.spec.box.stops, entry.spec.shape, strict=True)
        assert all(stop <= total for stop, total in stops)
        at = entry.end
    return at == length_bytes


@given(identities, layouts, st.data())
@settings(max_examples=200)
def test_a_changed_byte_is_refused_or_leaves_a_sound_header(identity, layout, data):
    """Digests catch the change itself; this is what protects the reader before they are known."""
    template = header_template(identity, layout)
    header = bytearray(template.data)
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        parsed = parse_header(bytes(header), template.length_bytes)
    except REFUSED:
        return

    assert is_sound(parsed, template.length_bytes)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(identities, layouts, st.data())
@settings(max_examples=200)
def test_a_changed_field_is_refused_or_leaves_a_sound_header(identity, layout, data):
    template = header_template(identity, layout)
    table = json.loads(template.data[8:])
    entry = data.draw(st.sampled_from(sorted(table)))
    field = data.draw(st.sampled_from([*sorted(table[entry]), None]))
    value = data.draw(json_values | st.lists(st.integers(-1, 1 << 65), max_size=3))
    if field is None:
        table[entry] = value
    else:
        table[entry][field] = value
    text = json.dumps(table).encode()
    text += b" " * (-(len(text) + 8) % 64)
    length = template.length_bytes + 8 + len(text) - len(template.data)
    try:
        parsed = parse_header(struct.pack("<Q", len(text)) + text, length)
    except REFUSED:
        return

    assert is_sound(parsed, length)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_noise_is_refused(noise, length_bytes):
    try:
        parse_header(noise, length_bytes)
    except REFUSED:
        return
    raise AssertionError(f"{noise!r} was taken for a segment")

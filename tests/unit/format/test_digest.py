"""``core.digest``: parts and roots (G1)."""

import pytest
import xxhash

from holdfast.format import digest


@pytest.mark.parametrize(
    ("length", "parts"),
    [
        (0, 0),
        (1, 1),
        (digest.PART_BYTES, 1),
        (digest.PART_BYTES + 1, 2),
        (3 * digest.PART_BYTES, 3),
    ],
)
def test_parts_cover_a_segment_in_order(length, parts):
    ranges = list(digest.part_ranges(length))

    assert parts == len(ranges) == digest.parts_count(length)
    assert [0, *(end for _, end in ranges)] == [*(begin for begin, _ in ranges), length]


def test_a_part_in_pieces_has_the_digest_of_the_part():
    data = bytes(range(256)) * 65
    hasher = digest.part_hasher()
    for begin in range(0, len(data), 1000):
        hasher.update(memoryview(data)[begin : begin + 1000])

    assert digest.part_digest(data) == hasher.digest()


def test_the_root_is_over_the_length_and_the_part_digests():
    """The rule of docs/reference/format-v1.md, spelled out by hand."""
    data = bytes(range(256)) * 65_537
    parts = [data[: 16 << 20], data[16 << 20 :]]
    listed = [xxhash.xxh3_128(part).digest() for part in parts]
    expected = xxhash.xxh3_128(len(data).to_bytes(8, "little") + b"".join(listed)).digest()

    assert listed == digest.part_digests(memoryview(data))
    assert expected == digest.root_digest(len(data), listed)


def test_one_flipped_bit_changes_the_root():
    data = bytearray(100)
    before = digest.root_digest(100, digest.part_digests(memoryview(data)))
    data[50] ^= 1

    assert before != digest.root_digest(100, digest.part_digests(memoryview(data)))


def test_a_root_needs_as_many_digests_as_parts():
    with pytest.raises(ValueError, match="1 part digests for 0 bytes"):
        digest.root_digest(0, [b"x" * 16])

"""``core.byte_sizes``: bytes as people write them."""

import pytest

from holdfast.core.byte_sizes import format_bytes, parse_bytes
from holdfast.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1024", 1024), ("512M", 512 << 20), ("2 GiB", 2 << 30), ("1.5k", 1536), (" 1TB ", 1 << 40),
     ("0", 0), ("999999999999999", 999_999_999_999_999)],
)  # fmt: skip
def test_a_size_is_read(text, expected):
    assert expected == parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "1e9", "1 PiB", "1\u212a", "1.", "٣", "1_000", "9" * 400]
)
def test_what_is_no_size_is_refused(text):
    """Among them the Kelvin sign, which equals K when case is ignored."""
    with pytest.raises(InvalidRequestError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (5 << 40, "5 TiB"),
     (-2048, "-2 KiB")],
)  # fmt: skip
def test_a_size_is_written(length, expected):
    assert expected == format_bytes(length)

"""What every store refuses alike: invalid keys and impossible uploads. Pure.

Units: bytes.
"""

from __future__ import annotations

from holdfast.errors import InvalidRequestError
from holdfast.objectstore import (
    UPLOAD_PART_BYTES_MIN,
    UPLOAD_PARTS_COUNT_MAX,
    Upload,
    UploadedPart,
)

KEY_BYTES_MAX = 1024
KEY_PART_BYTES_MAX = 255
# The directory store works there; no store has an object of that name, so that all are alike.
WORK_FOLDER = ".uploads"


def checked_key(key: str) -> str:
    """Return ``key`` if it is a valid key.

    Raises:
        InvalidRequestError: empty, too long, not text, or it could climb out of the store.
    """
    _checked_text(key)
    for part in key.split("/"):
        if part in ("", ".", ".."):
            raise InvalidRequestError(f"key {key[:80]!r} has a part {part!r}")
        if len(part.encode()) > KEY_PART_BYTES_MAX:
            raise InvalidRequestError(
                f"key {key[:80]!r} has a part of more than {KEY_PART_BYTES_MAX} bytes"
            )
    if key.split("/", 1)[0] == WORK_FOLDER:
        raise InvalidRequestError(f"key {key[:80]!r}: {WORK_FOLDER}/ is for the store itself")
    return key


def checked_prefix(prefix: str) -> str:
    """Return ``prefix`` if keys can begin with it; its last part may be unfinished.

    Raises:
        InvalidRequestError: no key begins like that.
    """
    whole, _, _ = prefix.rpartition("/")
    if prefix.startswith("/"):
        raise InvalidRequestError(f"prefix {prefix[:80]!r} begins with a slash")
    if whole:
        checked_key(whole)
    if prefix:
        _checked_text(prefix)
    return prefix


def _checked_text(key: str) -> None:
    try:
        length_bytes = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"key {key[:80]!r} is not text") from error
    if not 0 < length_bytes <= KEY_BYTES_MAX:
        raise InvalidRequestError(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {length_bytes}")
    # Listings are XML, which cannot say a control character.
    if not key.isprintable() and any(ord(c) < 32 or 127 <= ord(c) < 160 for c in key):
        raise InvalidRequestError(f"key {key[:80]!r} has a control character")


def checked_plan(length_bytes: int, part_bytes: int) -> None:
    """Refuse an upload that not every store could take.

    Raises:
        InvalidRequestError: nothing to upload, parts too small, or too many of them.
    """
    if length_bytes < 1:
        raise InvalidRequestError(f"an upload of {length_bytes} bytes: put it instead")
    if part_bytes < min(UPLOAD_PART_BYTES_MIN, length_bytes):
        raise InvalidRequestError(f"parts of {part_bytes} bytes: {UPLOAD_PART_BYTES_MIN} at least")
    if parts_count(length_bytes, part_bytes) > UPLOAD_PARTS_COUNT_MAX:
        raise InvalidRequestError(
            f"{length_bytes} bytes in parts of {part_bytes} are more than "
            f"{UPLOAD_PARTS_COUNT_MAX} parts"
        )


def parts_count(length_bytes: int, part_bytes: int) -> int:
    """Return how many parts an upload has."""
    return -(-length_bytes // part_bytes)


def part_length_bytes(upload: Upload, number: int) -> int:
    """Return how many bytes part ``number`` has: all alike but the last.

    Raises:
        InvalidRequestError: the upload has no such part.
    """
    count = parts_count(upload.length_bytes, upload.part_bytes)
    if not 0 <= number < count:
        raise InvalidRequestError(f"part {number} of an upload of {count} parts")
    return min(upload.part_bytes, upload.length_bytes - number * upload.part_bytes)


def checked_part(upload: Upload, number: int, data: memoryview) -> memoryview:
    """Return ``data`` as bytes if it is as long as that part must be.

    Raises:
        InvalidRequestError: there is no such part, or ``data`` has another length.
    """
    expected = part_length_bytes(upload, number)
    if data.nbytes != expected:
        raise InvalidRequestError(f"part {number} has {expected} bytes, not {data.nbytes}")
    return data.cast("B")


def fits(upload: Upload, part: UploadedPart) -> bool:
    """Return whether ``part`` is one of the plan; another part size may have been used before."""
    count = parts_count(upload.length_bytes, upload.part_bytes)
    return part.number < count and part.length_bytes == part_length_bytes(upload, part.number)


def checked_parts(upload: Upload, parts: list[UploadedPart]) -> None:
    """Refuse to finish unless ``parts`` are all of them, in order, each with its length.

    Raises:
        InvalidRequestError: one is missing, twice, out of order or of another length.
    """
    count = parts_count(upload.length_bytes, upload.part_bytes)
    if [part.number for part in parts] != list(range(count)):
        raise InvalidRequestError(f"{len(parts)} parts, not 0 to {count - 1} in order")
    for part in parts:
        if part.length_bytes != part_length_bytes(upload, part.number):
            raise InvalidRequestError(f"part {part.number} has {part.length_bytes} bytes")

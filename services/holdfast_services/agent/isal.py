"""Adds weighted bytes with ISA-L, the library that pyeclib brings along in its wheel.

pyeclib's own interface copies; the library under it reads each piece once where it lies, and
ctypes gives up the interpreter's lock meanwhile. Knows no stripe: see ``holdfast.format.parity``.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from holdfast.errors import PreconditionError

BYTES_PER_CALL_MAX = 1 << 30
TABLE_BYTES = 32
MISSING = "parity takes ISA-L, which pip install 'holdfast[services]' brings with pyeclib: {}"


def write_sum(target: memoryview, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """Make ``target`` the sum of all ``pieces``, each times its weight.

    Args:
        target: Writable bytes; what was there is of no account.
        pieces: Weight, 0 to 255, and writable bytes, which are not changed and must not overlap
            ``target``. A shorter one goes on with zeros, of a longer one the beginning counts.

    Raises:
        PreconditionError: the library is not here.
    """
    library = _library()
    ends = sorted({min(len(piece), len(target)) for _, piece in pieces} - {0})
    begin = 0
    for end in ends:
        reaching = [(weight, piece) for weight, piece in pieces if len(piece) >= end]
        while begin < end:
            length = min(BYTES_PER_CALL_MAX, end - begin)
            _write(library, target, reaching, begin, length)
            begin += length
    target[begin:] = bytes(len(target) - begin)


def check() -> None:
    """See that the library is here.

    Raises:
        PreconditionError: it is not; says how to get it.
    """
    _library()


def _write(
    library: ctypes.CDLL,
    target: memoryview,
    pieces: Sequence[tuple[int, memoryview]],
    begin: int,
    length: int,
) -> None:
    count = len(pieces)
    tables = ctypes.create_string_buffer(TABLE_BYTES * count)
    library.ec_init_tables(count, 1, bytes(weight for weight, _ in pieces), tables)
    sources = (ctypes.c_void_p * count)(*(address(piece, begin) for _, piece in pieces))
    targets = (ctypes.c_void_p * 1)(address(target, begin))
    library.ec_encode_data(length, count, 1, tables, sources, targets)


def address(view: memoryview, offset: int = 0) -> int:
    """Return where a byte of a writable view lies in memory, as the library takes it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view, offset))


@cache
def _library() -> ctypes.CDLL:
    path = _path()
    try:
        library = ctypes.CDLL(path)
        library.ec_init_tables.restype = library.ec_encode_data.restype = None
        library.ec_init_tables.argtypes = [
            ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p,
        ]  # fmt: skip
        library.ec_encode_data.argtypes = [
            ctypes.c_int, ctypes.c_int, ctypes.c_int,
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
    except (OSError, AttributeError) as cause:
        raise PreconditionError(MISSING.format(cause)) from cause
    return library


def _path() -> str:
    """Return where the library is: beside pyeclib, else where the system has it."""
    found = importlib.util.find_spec("pyeclib")
    if found is not None and found.origin is not None:
        bundled = Path(found.origin).parents[1] / "pyeclib.libs"
        for path in sorted(bundled.glob("libisal*.so*")):
            return str(path)
    of_system = ctypes.util.find_library("isal")
    if of_system is None:
        raise PreconditionError(MISSING.format("neither pyeclib nor the system has it"))
    return of_system

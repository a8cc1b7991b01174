"""The random generators of a process: Python, NumPy, torch and CUDA.

A *stream* is all of them at one moment, as plain data and tensors. NumPy's is taken only where
NumPy was imported, CUDA's only where CUDA is in use.
"""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch

Stream: TypeAlias = dict[str, object]


def take() -> Stream:
    """Return the present stream; later draws do not change what was returned."""
    stream = _stream(_raw())
    stream["seed"] = torch.initial_seed()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stream["cuda"] = torch.cuda.get_rng_state_all()
    return stream


def put(stream: Stream) -> None:
    """Make ``stream`` the present one; generators it does not name are left as they are."""
    version, words, gauss = cast("Any", stream["python"])
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(cast("torch.Tensor", stream["torch"]))
    if "numpy" in stream:
        import numpy as np  # noqa: PLC0415 - only where the stream has one

        kind, keys, *rest = cast("Any", stream["numpy"])
        np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002
    if "cuda" in stream and torch.cuda.is_available():
        states = cast("list[torch.Tensor]", stream["cuda"])
        torch.cuda.set_rng_state_all(states[: torch.cuda.device_count()])


def put_derived(*, seed: int, step: int, rank: int) -> None:
    """Seed all generators from (seed, step, rank): for a world size that was not saved."""
    text = f"{seed}.{step}.{rank}".encode()
    number = _number(text)
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        cast("Any", sys.modules["numpy"]).random.seed(number & 0xFFFF_FFFF)


class Apart:
    """A stream that one consumer draws from: what it draws inside ``used`` leaves the others alone.

    Without CUDA: nothing there draws between batches.
    """

    def __init__(self) -> None:
        """Derive each generator from the present one of its kind, which is not moved by that.

        One by one: a script that seeds torch and not NumPy has torch's draws repeated.
        """
        words, torch_state, numpy_state = _raw()
        self._inside: _Raw = (
            random.Random(_number(repr(words).encode())).getstate(),  # noqa: S311 - users' own kind
            torch.Generator().manual_seed(_number(torch_state.numpy().tobytes())).get_state(),
            numpy_state
            and _numpy().RandomState(_number(_numpy_bytes(numpy_state)) >> 32).get_state(),
        )

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let everything inside draw from this stream."""
        outside = _raw()
        _put_raw(self._inside)
        try:
            yield
        finally:
            self._inside = _raw()
            _put_raw(outside)

    def take(self) -> Stream:
        """Return where this stream is."""
        return _stream(self._inside)

    def put(self, stream: Stream) -> None:
        """Go on from ``stream``."""
        with self.used():
            put(stream)


_Raw: TypeAlias = tuple[Any, torch.Tensor, Any]


def _numpy() -> Any:
    return cast("Any", sys.modules["numpy"]).random


def _raw() -> _Raw:
    return (
        random.getstate(),
        torch.get_rng_state(),
        _numpy().get_state() if "numpy" in sys.modules else None,
    )


def _stream(raw: _Raw) -> Stream:
    (version, words, gauss), state, numpy_state = raw
    drawn = torch.frombuffer(array("q", words), dtype=torch.int64)  # not a look at each in turn
    stream: Stream = {"python": [version, drawn, gauss], "torch": state}
    if numpy_state is not None:
        kind, keys, *rest = numpy_state
        stream["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
    return stream


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _numpy_bytes(state: Any) -> bytes:
    _, keys, *rest = state
    return bytes(keys.tobytes()) + repr(rest).encode()


def _put_raw(raw: _Raw) -> None:
    random.setstate(raw[0])
    torch.set_rng_state(raw[1])
    if raw[2] is not None:
        _numpy().set_state(raw[2])


@contextmanager
def kept() -> Iterator[None]:
    """Leave the stream as it was before, whatever is drawn inside."""
    stream = take()
    try:
        yield
    finally:
        put(stream)

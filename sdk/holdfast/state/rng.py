"""The random generators of a process: Python, NumPy, torch and CUDA.

A *stream* is all of them at one moment, as plain data and tensors. NumPy's is taken only where
NumPy was imported, CUDA's only where CUDA is in use.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias, cast

import torch

from holdfast.state import generators
from holdfast.state.generators import Generator

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


def without_devices(stream: Stream) -> Stream:
    """Return what an ``Apart`` takes of a stream."""
    return {name: stream[name] for name in ("python", "torch", "numpy") if name in stream}


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
        python = random.Random(_number(repr(_python().told(words)).encode()))  # noqa: S311 - users' own kind
        state = torch.Generator().manual_seed(_number(torch_state.numpy().tobytes())).get_state()
        self._inside: _Raw = words, state, numpy_state
        with self.used():
            random.setstate(python.getstate())
            if numpy_state is not None:
                seed = _number(_numpy_bytes(_numpy().told(numpy_state))) >> 32
                cast("Any", sys.modules["numpy"]).random.seed(seed)

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
"""Of Python, torch and NumPy, None without; as ``generators`` takes them."""


@cache
def _python() -> Generator:
    return generators.python()


@cache
def _numpy() -> Generator:
    return generators.numpy(sys.modules["numpy"])


def _raw() -> _Raw:
    numpy = _numpy().take() if "numpy" in sys.modules else None
    return _python().take(), torch.get_rng_state(), numpy


def _stream(raw: _Raw) -> Stream:
    stream: Stream = {"python": _python().plain(raw[0]), "torch": raw[1]}
    if raw[2] is not None:
        stream["numpy"] = _numpy().plain(raw[2])
    return stream


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _numpy_bytes(state: Any) -> bytes:
    _, keys, *rest = state
    return bytes(keys.tobytes()) + repr(rest).encode()


def _put_raw(raw: _Raw) -> None:
    _python().put(raw[0])
    torch.set_rng_state(raw[1])
    if raw[2] is not None:
        _numpy().put(raw[2])


@contextmanager
def kept() -> Iterator[None]:
    """Leave the stream as it was before, whatever is drawn inside."""
    stream = take()
    try:
        yield
    finally:
        put(stream)

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
from typing import Any, TypeAlias, cast

import torch

Stream: TypeAlias = dict[str, object]


def take() -> Stream:
    """Return the present stream; later draws do not change what was returned."""
    version, words, gauss = random.getstate()
    stream: Stream = {
        "python": [version, torch.tensor(words), gauss],
        "torch": torch.get_rng_state(),
        "seed": torch.initial_seed(),
    }
    if "numpy" in sys.modules:
        numpy = cast("Any", sys.modules["numpy"])
        kind, keys, *rest = numpy.random.get_state()
        stream["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
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
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        cast("Any", sys.modules["numpy"]).random.seed(number & 0xFFFF_FFFF)


class Apart:
    """A stream that one consumer draws from: what it draws inside ``used`` leaves the others alone.

    Without CUDA: nothing there draws between batches.
    """

    def __init__(self) -> None:
        """Derive it from the present stream, which is not moved by that."""
        words, torch_state, numpy_state = _raw()
        text = repr((words, numpy_state and [numpy_state[1].tobytes(), *numpy_state[2:]])).encode()
        digest = hashlib.blake2b(torch_state.numpy().tobytes() + text, digest_size=8).digest()
        number = int.from_bytes(digest, "little") >> 1
        self._inside: _Raw = (
            random.Random(number).getstate(),  # noqa: S311 - the kind that users draw from
            torch.Generator().manual_seed(number).get_state(),
            numpy_state and _numpy().RandomState(number & 0xFFFF_FFFF).get_state(),
        )

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let everything inside draw from it."""
        outside = _raw()
        _put_raw(self._inside)
        try:
            yield
        finally:
            self._inside = _raw()
            _put_raw(outside)

    def take(self) -> Stream:
        """Return where it is."""
        with self.used():
            stream = take()
        stream.pop("cuda", None)
        return stream

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

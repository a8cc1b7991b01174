"""The global generators of Python and NumPy, taken and put back in microseconds.

Their own calls make a Python number of each of 624 words: 20 µs, and 130 µs for NumPy's. Here the
words are copied as they lie in memory. Where they lie is looked for once, in generators made for
that, and believed if their own calls say the same; else those are used.
"""

from __future__ import annotations

import ctypes
import random
import struct
from array import array
from typing import Any, Protocol, TypeAlias

import torch

Raw: TypeAlias = Any
"""What one generator was at one moment; only the object that took it knows how to read it."""

_WORDS = struct.Struct("=624I")
_INDEX = struct.Struct("=i")
_GAUSS = struct.Struct("=i4xd")
_SIZE = _WORDS.size + _INDEX.size
_ALIGNED = 8
PROBE_SEED = 5


class Generator(Protocol):
    """One of the global generators."""

    def take(self) -> Raw:
        """Return what it is now; later draws do not change what was returned."""

    def put(self, raw: Raw) -> None:
        """Make it what it was when ``raw`` was taken."""

    def told(self, raw: Raw) -> Any:
        """Return ``raw`` as its own call would have told it."""

    def plain(self, raw: Raw) -> list[object]:
        """Return that as plain values and a tensor of its words, which are the caller's."""


class Own:
    """A generator by its own calls, ``random``'s or ``numpy.random``'s."""

    def __init__(self, module: Any) -> None:
        numpy = hasattr(module, "get_state")
        self.take = module.get_state if numpy else module.getstate
        self.put = module.set_state if numpy else module.setstate

    def told(self, raw: Raw) -> Any:
        """See ``Generator``."""
        return raw

    def plain(self, raw: Raw) -> list[object]:
        """See ``Generator``."""
        if type(raw[1]) is tuple:
            version, words, gauss = raw
            return [version, torch.frombuffer(array("q", words), dtype=torch.int64), gauss]
        kind, keys, *rest = raw
        return [kind, torch.from_numpy(keys.astype("int64")), *rest]


class PythonWords:
    """Python's generator ``held``: an index and its words, from ``offset`` on."""

    def __init__(self, held: random.Random, offset: int) -> None:
        self._held: Any = held
        self._block = _at(id(held) + offset, _SIZE)

    def take(self) -> Raw:
        """See ``Generator``."""
        return self._block.raw, self._held.gauss_next

    def put(self, raw: Raw) -> None:
        """See ``Generator``."""
        self._block.raw, self._held.gauss_next = raw

    def told(self, raw: Raw) -> Any:
        """See ``Generator``."""
        block, gauss = raw
        words = (*_WORDS.unpack_from(block, _INDEX.size), *_INDEX.unpack_from(block))
        return random.Random.VERSION, words, gauss

    def plain(self, raw: Raw) -> list[object]:
        """See ``Generator``."""
        block, gauss = raw
        return [random.Random.VERSION, _numbers(block[_INDEX.size :] + block[: _INDEX.size]), gauss]


class NumpyWords:
    """NumPy's generator ``held``: words and position, and a draw kept for later at ``offset``.

    Somebody may give it other bits to draw from (``set_bit_generator``): then by its own calls.
    """

    def __init__(self, module: Any, held: Any, offset: int) -> None:
        self._module, self._held, self._own = module, held, Own(module.random)
        self._bits = held._bit_generator  # noqa: SLF001 - it has no other name
        self._words = _at(self._bits.ctypes.state_address, _SIZE)
        self._gauss = _at(id(held) + offset, _GAUSS.size)

    def take(self) -> Raw:
        """See ``Generator``."""
        if self._held._bit_generator is not self._bits:  # noqa: SLF001 - see above
            return self._held.get_state()
        return self._words.raw, self._gauss.raw

    def put(self, raw: Raw) -> None:
        """See ``Generator``."""
        if len(raw) != 2 or self._held._bit_generator is not self._bits:  # noqa: SLF001 - see above
            self._held.set_state(self.told(raw))
        else:
            self._words.raw, self._gauss.raw = raw

    def told(self, raw: Raw) -> Any:
        """See ``Generator``."""
        if len(raw) != 2:
            return raw
        words, gauss = raw
        keys = self._module.frombuffer(words, "uint32", count=624).copy()
        return "MT19937", keys, *_INDEX.unpack_from(words, _WORDS.size), *_GAUSS.unpack(gauss)

    def plain(self, raw: Raw) -> list[object]:
        """See ``Generator``."""
        if len(raw) != 2:
            return self._own.plain(raw)
        words, gauss = raw
        at = _INDEX.unpack_from(words, _WORDS.size)
        return ["MT19937", _numbers(words[: _WORDS.size]), *at, *_GAUSS.unpack(gauss)]


def python() -> Generator:
    """Return Python's."""
    probe = random.Random(PROBE_SEED)  # noqa: S311 - to be looked at
    *words, index = probe.getstate()[1]
    offset = _memory(probe).find(_INDEX.pack(index) + _WORDS.pack(*words))
    held = getattr(random, "_inst", None)
    if type(held) is random.Random and offset >= 0 and _is_right(PythonWords(probe, offset), probe):
        return PythonWords(held, offset)
    return Own(random)


def numpy(module: Any) -> Generator:
    """Return that of the module ``numpy``."""
    held: Any = getattr(module.random.mtrand, "_rand", None)
    probe: Any = module.random.RandomState(PROBE_SEED)
    if type(held) is not type(probe) or held.get_state(legacy=False)["bit_generator"] != "MT19937":
        return Own(module.random)
    probe.standard_normal()  # draws two and keeps one
    kept, memory = probe.get_state()[3:], _memory(probe)
    places = range(0, len(memory) - _GAUSS.size + 1, _ALIGNED)
    for offset in (at for at in places if _GAUSS.unpack_from(memory, at) == kept):
        if _is_right(NumpyWords(module, probe, offset), probe):
            return NumpyWords(module, held, offset)
    return Own(module.random)


def _is_right(words: PythonWords | NumpyWords, probe: Any) -> bool:
    """Tell whether what is taken is what the generator says, and is put back as it was."""
    own = probe.get_state if isinstance(words, NumpyWords) else probe.getstate
    before, raw = repr(own()), words.take()
    if repr(words.told(raw)) != before:
        return False
    for _ in range(PROBE_SEED):
        probe.normal() if isinstance(words, NumpyWords) else probe.gauss(0, 1)
    words.put(raw)
    return repr(own()) == before


def _numbers(words: bytes) -> torch.Tensor:
    """Return unsigned words as numbers."""
    signed = torch.frombuffer(bytearray(words), dtype=torch.int32)
    return signed.to(torch.int64).bitwise_and_(0xFFFF_FFFF)


def _memory(holder: object) -> bytes:
    return ctypes.string_at(id(holder), type(holder).__basicsize__)


def _at(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)

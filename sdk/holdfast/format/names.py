"""The names of a checkpoint's tensors that say whose they are: a rank's text, a rank's own tensor.

``docs/reference/format-v1.md`` is normative. Every other name belongs to all ranks. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

BLOB_PREFIX = "holdfast.rank."
OWN_PREFIX = "rank."
EXTRA_PREFIX = "holdfast.extra."
"""Before a module's name: what it says beside its tables."""
RESERVED = frozenset({"holdfast", "rank"})
"""First parts of names that no state of the user's may have."""

_DIGITS_MAX = 7


def blob_name(rank: int) -> str:
    """Return the name of the text that ``rank`` saves."""
    return f"{BLOB_PREFIX}{rank}"


def blob_rank(name: str) -> int | None:
    """Return whose text a tensor of this name is, None when it is an ordinary tensor.

    >>> blob_rank("holdfast.rank.3")
    3
    """
    rank = name.removeprefix(BLOB_PREFIX)
    return int(rank) if rank != name and _is_rank(rank) else None


def own_name(name: str, rank: int) -> str:
    """Return under which name ``rank`` saves its own tensor ``name``.

    >>> own_name("model.weight", 3)
    'rank.3.model.weight'
    """
    return f"{OWN_PREFIX}{rank}.{name}"


def name_for(stored: str, rank: int) -> str | None:
    """Return what the tensor ``stored`` is called by ``rank``, None if it is another rank's own.

    >>> name_for("rank.3.model.weight", 3), name_for("model.weight", 3), name_for("rank.1.x", 3)
    ('model.weight', 'model.weight', None)
    """
    own = own_name("", rank)
    if stored.startswith(own):
        return stored[len(own) :]
    return None if stored.startswith(OWN_PREFIX) else stored


def unranked(stored: str) -> str:
    """Return what a rank calls the tensor that is its own as ``stored``; else ``stored``.

    >>> unranked("rank.3.model.weight"), unranked("model.weight")
    ('model.weight', 'model.weight')
    """
    rank, _, name = stored.removeprefix(OWN_PREFIX).partition(".")
    return name if stored.startswith(OWN_PREFIX) and _is_rank(rank) else stored


def own_rank(stored: str) -> int | None:
    """Return whose own the tensor ``stored`` is, by its name; None: everybody's.

    >>> own_rank("rank.3.model.weight"), own_rank("model.weight")
    (3, None)
    """
    rank, _, _ = stored.removeprefix(OWN_PREFIX).partition(".")
    return None if unranked(stored) == stored else int(rank)


def is_under(name: str, keys: Collection[str]) -> bool:
    """Tell whether a name of the state is one of ``keys``, or of something inside one.

    >>> is_under("model.weight", ["model"]), is_under("model2", ["model"])
    (True, False)
    >>> is_under("holdfast.extra.model.0.scale", ["model"])
    True
    """
    name = name.removeprefix(EXTRA_PREFIX)
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def is_shared(stored: str) -> bool:
    """Tell whether the tensor ``stored`` belongs to all ranks, whoever of them saves it.

    >>> is_shared("model.weight"), is_shared("rank.3.model.weight"), is_shared("holdfast.rank.3")
    (True, False, False)
    """
    return not stored.startswith((OWN_PREFIX, BLOB_PREFIX))


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX

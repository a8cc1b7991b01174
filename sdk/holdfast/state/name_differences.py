"""What a script and a checkpoint lack of each other, in one sentence with the nearest names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

NAMES_SHOWN_MAX = 5
NAMES_COMPARED_MAX = 1_000
"""Of the checkpoint's, with each name that is shown: 0.1 s."""
_ALIKE = 0.8
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


def name_differences(what: str, here: Sequence[str], there: Sequence[str]) -> str:
    """Return what exists only in the script (``here``), and only in the checkpoint (``there``).

    Beside a name of the script stands the most similar one of the checkpoint: most were renamed.

    >>> name_differences("tensor", ["net.layers.0"], ["net.layer.0", "head"])
    "tensor 'net.layers.0' (there: 'net.layer.0') exists only in the script, tensors \
'net.layer.0', 'head' exist only in the checkpoint"
    """
    near = {name: _nearest(name, there) for name in here[:NAMES_SHOWN_MAX]}
    named = [
        f"{name!r} (there: {other!r})" if other else repr(name) for name, other in near.items()
    ]
    clauses = (
        _clause(what, named, len(here), "script"),
        _clause(what, [*map(repr, there[:NAMES_SHOWN_MAX])], len(there), "checkpoint"),
    )
    return ", ".join(filter(None, clauses))


def numbered_alike(some: Iterable[str], others: Iterable[str]) -> bool:
    """Tell whether a name differs from one of ``others`` in numbers alone, as layers do.

    >>> numbered_alike(["net.layers.2.weight"], ["net.layers.0.weight", "net.head"])
    True
    """
    known = {_NUMBER.sub("#", name) for name in others}
    return any("#" in name and name in known for name in (_NUMBER.sub("#", n) for n in some))


def _nearest(name: str, others: Sequence[str]) -> str:
    return next(iter(get_close_matches(name, others[:NAMES_COMPARED_MAX], 1, _ALIKE)), "")


def _clause(what: str, shown: Sequence[str], count: int, where: str) -> str:
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    noun, verb = (what, "exists") if count == 1 else (f"{what}s", "exist")
    return f"{noun} {', '.join(shown)}{more} {verb} only in the {where}" if count else ""

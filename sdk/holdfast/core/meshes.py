"""In which meshes a job can train: one for each number of ranks that it may have. Pure.

A mesh is the length of each axis, ``dp=4,tp=2``: so many ranks as the product. One axis may be
``*``: as long as the ranks make it. All meshes of a job name the same axes in the same order, so
that its script finds each axis in any of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from holdfast.errors import InvalidRequestError

MESH, MESHES = "HOLDFAST_MESH", "HOLDFAST_MESHES"
"""Variables with the mesh of a rank's round, and with all that there may be, ``;`` between them."""
MESHES_COUNT_MAX = 64
TEXT_LENGTH_MAX = 200
AXES_COUNT_MAX = 8
LENGTH_MAX = 65_536

_AXIS = re.compile(r"([a-z][a-z0-9_]{0,31})=(\*|[1-9][0-9]{0,4})")

Mesh = Mapping[str, int]
"""The length of each axis, in order."""


def check(meshes: Sequence[str]) -> None:
    """Refuse meshes of which it would not be clear which one is meant.

    Raises:
        InvalidRequestError: names the mesh.
    """
    if len(meshes) > MESHES_COUNT_MAX:
        raise InvalidRequestError(f"{len(meshes)} meshes are more than {MESHES_COUNT_MAX}")
    for text in meshes:
        if len(text) > TEXT_LENGTH_MAX:
            raise InvalidRequestError(
                f"mesh {text[:40]!r}… of {len(text)} characters is longer than {TEXT_LENGTH_MAX}"
            )
    parsed = [_parsed(text) for text in meshes]
    for text, axes in zip(meshes, parsed, strict=True):
        if list(axes) != list(parsed[0]):
            raise InvalidRequestError(
                f"meshes {meshes[0]} and {text} do not name the same axes in the same order: an "
                f"axis that is not used has length 1"
            )
    counts = [math.prod(axes.values()) for axes in parsed if 0 not in axes.values()]
    for count in counts:
        if counts.count(count) > 1:
            raise InvalidRequestError(f"there are two meshes for {count} ranks")


def mesh_for(meshes: Sequence[str], ranks: int) -> Mesh | None:
    """Return the mesh for so many ranks: one that is made for them, else the first that fits.

    >>> mesh_for(["dp=*,tp=4", "dp=1,tp=2"], 8), mesh_for(["dp=*,tp=4", "dp=1,tp=2"], 2)
    ({'dp': 2, 'tp': 4}, {'dp': 1, 'tp': 2})
    >>> mesh_for(["dp=*,tp=4", "dp=1,tp=2"], 6) is None
    True
    """
    found = None
    for text in meshes:
        axes = _parsed(text)
        known = math.prod(length for length in axes.values() if length)
        if 0 not in axes.values():
            if known == ranks:
                return dict(axes)
        elif found is None and ranks >= known and ranks % known == 0:
            found = {name: length or ranks // known for name, length in axes.items()}
    return found


def bounds(meshes: Sequence[str]) -> tuple[int, int] | None:
    """Return the least and the most ranks of meshes; None: one is as long as the ranks make it.

    >>> bounds(["dp=1,tp=2", "dp=4,tp=2"]), bounds(["dp=*,tp=2"])
    ((2, 8), None)
    """
    parsed = [_parsed(text) for text in meshes]
    if any(0 in axes.values() for axes in parsed):
        return None
    counts = [math.prod(axes.values()) for axes in parsed]
    return min(counts), max(counts)


def counts(meshes: Sequence[str]) -> list[int]:
    """Return the numbers of ranks for which a mesh is made, those of ``*`` apart."""
    parsed = [_parsed(text) for text in meshes]
    return sorted(math.prod(axes.values()) for axes in parsed if 0 not in axes.values())


def text_of(mesh: Mesh) -> str:
    """Return a mesh as text.

    >>> text_of({"dp": 2, "tp": 4})
    'dp=2,tp=4'
    """
    return ",".join(f"{name}={length}" for name, length in mesh.items())


def of_environment(environ: Mapping[str, str]) -> list[str]:
    """Return the meshes that the environment names; empty: none.

    Raises:
        InvalidRequestError: names the mesh that is none.
    """
    found = [text.strip() for text in environ.get(MESHES, "").split(";") if text.strip()]
    check(found)
    return found


def required(meshes: Sequence[str], ranks: int) -> Mesh:
    """Return the mesh for so many ranks.

    Raises:
        InvalidRequestError: there is none.
    """
    mesh = mesh_for(meshes, ranks)
    if mesh is None:
        raise InvalidRequestError(f"there is no mesh for {ranks} ranks among {'; '.join(meshes)}")
    return mesh


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Mesh:
    """Return the length of each axis, 0 for ``*``."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        found = _AXIS.fullmatch(part.strip())
        if found is None or found[1] in axes or len(axes) == AXES_COUNT_MAX:
            raise InvalidRequestError(
                f"mesh {text[:200]!r} is none: write the length of each axis, as dp=4,tp=2 or "
                f"dp=*,tp=2"
            )
        axes[found[1]] = 0 if found[2] == "*" else int(found[2])
    lengths = list(axes.values())
    if lengths.count(0) > 1 or math.prod(length or 1 for length in lengths) > LENGTH_MAX:
        raise InvalidRequestError(
            f"mesh {text[:200]!r}: one axis may be *, and all others together have at most "
            f"{LENGTH_MAX} ranks"
        )
    return axes

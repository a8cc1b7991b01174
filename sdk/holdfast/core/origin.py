"""What an attempt was started with: code, command and user, for who looks back later. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

COMMIT_LENGTH_MAX = 100
COMMAND_LENGTH_MAX = 2_000
USER_LENGTH_MAX = 200


class Tree(IntEnum):
    """Whether the files of a repository were those of its commit; UNKNOWN: nobody looked."""

    UNKNOWN = 0
    CLEAN = 1
    DIRTY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where what an attempt saves has come from; a text is empty where it is not known.

    ``commit`` is that of the repository of the script, or what the user calls their code.
    """

    commit: str = ""
    tree: Tree = Tree.UNKNOWN
    command: str = ""
    user: str = ""


def kept(origin: Origin) -> Origin:
    """Return ``origin`` as it can be kept anywhere: cut, and what cannot be printed is marked.

    It is for people and decides nothing, so nothing of it is a reason to refuse.
    """
    return replace(
        origin,
        commit=_plain(origin.commit)[:COMMIT_LENGTH_MAX],
        command=_plain(origin.command)[:COMMAND_LENGTH_MAX],
        user=_plain(origin.user)[:USER_LENGTH_MAX],
    )


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)

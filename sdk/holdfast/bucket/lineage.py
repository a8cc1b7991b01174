"""Which checkpoints of a run are superseded, from what lies in its bucket alone (P6). Pure.

Each manifest says what its attempt had restored, and a note of a rollback what the run went back
to. A checkpoint later than that and of an older generation is *superseded*: training went on
without it. It may be named, never chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core import lines
from holdfast.core.lines import Move
from holdfast.core.node_view import SupersedeRule
from holdfast.format.manifest import Manifest
from holdfast.format.rollback import Rollback


def moves(manifests: Iterable[Manifest], rollbacks: Iterable[Rollback] = ()) -> tuple[Move, ...]:
    """Return where the attempts behind ``manifests``, all of one run, began, and users went back.

    An attempt without a parent began at step 0 and supersedes all that older ones did.
    """
    begun = {lines.to(made.parent, made.checkpoint.generation) for made in manifests}
    return tuple(sorted(begun.union(lines.to(back.to, back.generation) for back in rollbacks)))


def rules(
    manifests: Iterable[Manifest], rollbacks: Iterable[Rollback] = ()
) -> tuple[SupersedeRule, ...]:
    """Return what follows from ``moves``, by rising generation."""
    return lines.rules_of(moves(manifests, rollbacks))


def newest(manifests: Iterable[Manifest], rollbacks: Iterable[Rollback] = ()) -> Manifest | None:
    """Return the newest checkpoint of one run that is not superseded; None if there is none."""
    listed = sorted(manifests, key=lambda manifest: manifest.checkpoint, reverse=True)
    superseded = rules(listed, rollbacks)
    for manifest in listed:
        if not any(rule.covers(manifest.checkpoint) for rule in superseded):
            return manifest
    return None

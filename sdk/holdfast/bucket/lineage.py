"""Which checkpoints of a run are superseded, from their manifests alone (P6). Pure.

Each manifest says what its attempt had restored. A checkpoint later than that and of an older
generation is *superseded*: training went on without it. It may be named, never chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.node_view import SupersedeRule
from holdfast.format.manifest import Manifest


def rules(manifests: Iterable[Manifest]) -> tuple[SupersedeRule, ...]:
    """Return what the restores behind ``manifests``, all of one run, have superseded, sorted.

    An attempt without a parent began at step 0 and supersedes all that older ones did.
    """
    found = {
        SupersedeRule(
            after_step=manifest.parent.step if manifest.parent else 0,
            below_generation=manifest.checkpoint.generation,
        )
        for manifest in manifests
    }
    return tuple(sorted(found, key=lambda rule: (rule.below_generation, rule.after_step)))


def newest(manifests: Iterable[Manifest]) -> Manifest | None:
    """Return the newest checkpoint of one run that is not superseded; None if there is none."""
    listed = sorted(manifests, key=lambda manifest: manifest.checkpoint, reverse=True)
    superseded = rules(listed)
    for manifest in listed:
        if not any(rule.covers(manifest.checkpoint) for rule in superseded):
            return manifest
    return None

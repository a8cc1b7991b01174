"""Notes: what users say of a step comes from rank 0's reports into the row of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.reports import NOTE_BYTES_MAX
from holdfast.errors import ManifestError
from holdfast.format.canonical import strict_object
from holdfast.format.manifest import check_notes
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.model import Node, Run


def annotate(run: Run, nodes: Mapping[str, Node]) -> Run:
    """Return the run whose rows have the notes that rank 0 of their attempt said."""
    said = status_by_rank(run, nodes).get(0)
    notes = {note.step: note.json for note in said.report.notes} if said else {}
    bare = [
        row
        for row in run.checkpoints
        if not row.notes and row.id.generation == run.generation and row.id.step in notes
    ]
    known = {row.id: notes[row.id.step] for row in bare if usable_notes(notes[row.id.step])}
    if not known:
        return run
    rows = (replace(r, notes=known[r.id]) if r.id in known else r for r in run.checkpoints)
    return replace(run, checkpoints=tuple(rows))


def usable_notes(text: str) -> bool:
    """Tell whether a manifest may hold ``text`` as notes; other notes are dropped.

    What a manifest refuses would keep the checkpoint from ever becoming durable.
    """
    try:
        check_notes(strict_object(text.encode(), what="notes", bytes_max=NOTE_BYTES_MAX))
    except ManifestError:
        return False
    return True

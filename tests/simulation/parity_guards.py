"""The guards of parity, each as a mutant that lacks it; see ``guards``."""

from __future__ import annotations

from tests.simulation.mutant import mutant

OF_PARITY = (
    mutant(
        "parity-survives",
        "a stripe protects once it outlives as many losses as were asked for",
        ("metadata/domain/shortage.py", "if held.survives(asked, holders, domains)", "if held.elements"),
    ),
    mutant(
        "parity-rebuilt",
        "what follows from the rest of its stripe can be restored",
        ("metadata/domain/believed_copies.py", "if rebuilt is None or item.shard != shard:", "if True:"),
    ),
    mutant(
        "parity-keeps",
        "elements stay as long as their checkpoint may be gone back to",
        ("agent/domain/elements.py", "        and slot_rules.spent(state, view, shard)\n", ""),
    ),
    mutant(
        "parity-spare",
        "an element is given back if its checkpoint is as safe without it",
        ("metadata/domain/spare_elements.py", "if kept is not None and element not in kept:", "if True:"),
    ),
    mutant(
        "parity-gone",
        "elements of checkpoints that nobody goes back to make room for a restore",
        ("metadata/domain/spare_elements.py", "return (*needless, *old)[:SPARES_IN_VIEW_MAX]", "return ()"),
    ),
    mutant(
        "parity-keepers",
        "a copy is given back for a stripe if that protects with one copy of each member",
        ("metadata/domain/copies_to_fetch.py",
         "striped_too = item.shard.id in self._striped_shards(item.shard.id.checkpoint)", "striped_too = self.asked.copies != self.asked"),
    ),
)  # fmt: skip

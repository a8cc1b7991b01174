"""What follows from bad news, for people; the event itself says the cause.

Kinds are those of ``docs/reference/events.md``. A kind that is not here has no consequence beyond
what its message says.
"""

from __future__ import annotations

CONSEQUENCES = {
    "node_lost": "Its copies count no more; other nodes make new ones. Ranks on it are over.",
    "round_failed": "What was trained since the newest checkpoint is trained again.",
    "launch_failed": "Nobody starts the job again until a user does.",
    "node_unheard": "If only its agent is away ranks go on; else they wait for a node.",
    "node_goes": "The job goes on without it after a step that is saved, if others are enough.",
    "notice_over": "What no other node holds is lost with that one.",
    "node_left_out": "The job goes on without this node for an hour.",
    "step_abandoned": "This step is no checkpoint; training goes on, and the next save counts.",
    "save_abandoned": "This step is no checkpoint; training goes on, and the next save counts.",
    "save_refused": "This step is no checkpoint; the newest good one stays.",
    "keep_failed": "What was broken is not there to be looked at; training and saves go on.",
    "seal_failed": "This step is no checkpoint, or waits for room; training goes on.",
    "plan_refused": "No step commits until all ranks have the same models and optimizers.",
    "replication_cut": "New steps stay local: a lost node would take them with it.",
    "replication_failed": "The step has fewer copies until another try succeeds.",
    "copies_fall_behind": "Some saves are left out until copies keep pace.",
    "element_failed": "The step is not protected by parity until another try succeeds.",
    "budget_exhausted": "The step has fewer copies until memory is free.",
    "arena_exhausted": "Saves on this node wait for room or are given up.",
    "restore_lost": "The job cannot go on as it asked to: see the message.",
    "restore_failed": "If the attempt ends before all ranks have loaded, an older step is taken.",
    "restore_refused": "The job does not begin: choose a step that can be restored.",
    "checkpoint_superseded": "Later steps are left behind; they stay until retention decides.",
    "job_rolled_back": "The next start restores that step; later ones are left behind.",
    "attempt_refused": "Only the launch that trains goes on.",
    "persist_failed": "The worker tries again; until then the step is in memory only.",
    "persist_lost": "This step will not be durable; the next one that is due goes.",
    "persist_off": "Nothing of this job outlives the loss of all nodes.",
    "persist_postponed": "A later step goes to the object store instead.",
    "checkpoint_bad": "It is not restored from the object store.",
    "queue_down": "Nothing goes to the object store until the queue answers; training goes on.",
    "object_store_failed": "The restore uses what is in memory.",
    "object_store_not_asked": "Checkpoints that only the store knows were not considered.",
    "quarantined": "This copy is never used; another node makes a new one.",
    "bad_source": "Its bytes were thrown away; another source is asked.",
    "fetch_failed": "Another try follows, or another source.",
    "transport_left": "Copies between these nodes are slower for a minute.",
    "transport_unused": "Copies of this node travel over TCP.",
}


def consequence(kind: str) -> str:
    """Return what follows from an event of this kind; empty: nothing more than it says."""
    return CONSEQUENCES.get(kind, "")

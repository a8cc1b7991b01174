"""The guards of the product, each as a mutant that lacks it; ``mutants`` tries them.

Each change names text that is in its file once.
"""

from __future__ import annotations

from tests.simulation.mended_defects import DEFECTS
from tests.simulation.mutant import Change, Mutant, mutant
from tests.simulation.parity_guards import OF_PARITY
from tests.simulation.room_guards import OF_ROOM

MUTANTS = (
    *DEFECTS,
    *OF_ROOM,
    *OF_PARITY,
    # -- defects that the simulator found ---------------------------------------------------------
    mutant(
        "N26 seat: trains",
        "a rank that trains is given no other number, though its mates were",
        ("metadata/domain/attempts.py", "mine = wish.spec.generation or known", "mine = known"),
    ),
    mutant(
        "N29 piled: older attempt",
        "no step of an attempt is given up for one of an attempt before it, whatever its number",
        ("metadata/domain/abandoned_steps.py",
         "if run.usable(key) and key.generation == committing(run)", "if run.usable(key)"),
    ),
    mutant(
        "N30 durable: acknowledged",
        "what is durable is acknowledged, whatever became of it in memory",
        ("metadata/domain/model.py", "return self.copied_at_s is not None or self.stored",
         "return self.copied_at_s is not None"),
    ),
    mutant(
        "N21 readmitted: shards",
        "a rank that had not loaded when the catalogue was lost is told the shards again",
        ("metadata/domain/restore_decision.py", "if not decision.shards:", "if False:"),
    ),
    mutant(
        "loaded-undecided",
        "what ranks have loaded stands in a catalogue from before it was confirmed",
        ("metadata/domain/restore_decision.py", "if any(rank.loaded for rank in run.ranks):\n        return Outcome(run=run)\n    if decision.state is DecisionState.PROPOSED",
         "if decision.state is DecisionState.PROPOSED"),
        ("agent/domain/slot_rules.py", " or (session.loaded and _undecided(view))", ""),
    ),
    mutant(
        "restored-again",
        "what a training attempt has restored is known again to a catalogue that was lost",
        ("metadata/domain/restore_decision.py", "return _watch_loading(_known_again(run, decision, facts), decision, facts)",
         "return _watch_loading(run, decision, facts)"),
    ),
    mutant(
        "restored-expired",
        "once a later step is acknowledged what was restored gets no row of what a late node has",
        ("metadata/domain/restore_decision.py", "(kept and kept > chosen) or", ""),
    ),
    mutant(
        "N19 slot: quarantined",
        "a copy that is bad takes none of the slots of its rank",
        ("agent/domain/slot_rules.py",
         "if slot.content.held is HeldState.QUARANTINED:\n        return False", "if False:\n        return False"),
    ),
    mutant(
        "N6 forgotten while it waits",
        "an attempt that waits for its restore hears that the catalogue has lost it",
        ("agent/domain/slot_rules.py",
         "not session.loaded and state.now_s < session.opened_s + FORGOTTEN_AFTER_S",
         "not session.loaded"),
    ),
    mutant(
        "N9 seat forgotten",
        "a rank whose mates brought the attempt back hears that it has no seat",
        ("agent/domain/slot_rules.py",
         "return session.spec.rank not in view.seats or (", "return ("),
    ),
    mutant(
        "N7 kept of an older attempt",
        "what is kept of an older attempt frees nothing of a newer one",
        ("agent/domain/slot_rules.py", "if keep is None or shard.generation > keep.generation:", "if keep is None:"),
    ),
    mutant(
        "N8 decisions numbered again",
        "what was found for a decision of a lost catalogue does not count for its namesake",
        ("agent/domain/event_handling.py", "            _forget_decisions(state, run.run)\n",
         "            pass\n"),
        ("agent/domain/event_handling.py", "verified_decision=event.decision)",
         "verified_decision=max(slot.content.verified_decision, event.decision))"),
    ),
    # -- attempts and who may speak --------------------------------------------------------------
    mutant(
        "fence-agent",
        "an agent fences sessions of older attempts",
        ("agent/domain/next_actions.py", "if not session.fenced and", "if False and"),
    ),
    mutant(
        "fence-seat",
        "a rank of a replaced attempt gets no seat in the new one",
        ("metadata/domain/attempts.py",
         "attempt is None or (mine is not None and mine != attempt.generation)",
         "attempt is None"),
    ),
    mutant(
        "fence-commit",
        "only the newest generation commits new steps",
        ("metadata/domain/commit_rule.py", "if row is None and key.generation != committing(run):",
         "if row is None and committing(run) is None:"),
    ),
    mutant(
        "nonces",
        "views and statuses of another attempt with the same number are not its own",
        ("metadata/domain/attempts.py", 'mine = mine and status.nonce in (attempt.spec.nonce, b"")',
         "mine = bool(mine)"),
        ("agent/domain/slot_rules.py", "return not view.nonce or view.nonce == session.spec.nonce",
         "return True"),
    ),
    mutant(
        "forgotten",
        "an attempt that trains while its catalogue is lost is taken in again",
        ("agent/domain/slot_rules.py",
         "if not session.active or state.view is None or state.lost:", "if True:"),
    ),
    mutant(
        "readmit-fence",
        "taken in again, an older attempt does not replace a newer one",
        ("metadata/domain/readmitted_attempt.py", "if generation < run.generation or (run.current and",
         "if False and (run.current and"),
        ("metadata/storage/runs.py", '_R.generation <= bindparam("generation_max")',
         '_R.generation - 1000 <= bindparam("generation_max")'),
    ),
    mutant(
        "readmit-rules",
        "taken in again, an attempt has left behind what its restore had",
        ("metadata/domain/readmitted_attempt.py",
         "changed = moved(changed, lines.to(past, generation))", "pass"),
    ),
    mutant(
        "M4",
        "an inventory is replaced only by a later one",
        ("metadata/storage/nodes.py", "(_N.incarnation < new.incarnation)", "(new.sequence >= 0)"),
        ("metadata/usecases/agents.py", "item.incarnation < known[0]", "item.incarnation < 0"),
    ),
    mutant(
        "view-order",
        "an agent does not take an older view for a newer one",
        ("agent/domain/event_handling.py", "if state.view is not None and event.view.taken <",
         "if False and event.view.taken <"),
    ),
    mutant(
        "pulse-gap",
        "leases hold on when it was the catalogue that was away",
        ("metadata/usecases/agents.py", "now_s, since_s) and gap:", "now_s, since_s) and False:"),
    ),
    # -- what is committed, and what is kept -----------------------------------------------------
    mutant(
        "whole",
        "a level is reached by the shards of all ranks",
        ("metadata/domain/believed_copies.py",
         "return len(sizes) == 1 and len(ranks_of(copies)) == sizes.pop()",
         "return len(sizes) == 1"),
    ),
    mutant(
        "unacknowledged",
        "copies count as safe only with holders that know of the commit",
        ("metadata/domain/commit_rule.py", "firm = firm_copies(copies, seen)", "firm = copies"),
    ),
    mutant(
        "M9",
        "older slots are freed for acknowledged checkpoints only",
        ("metadata/domain/commit_rule.py",
         "firm = {row.id for row in run.checkpoints if row.acknowledged}",
         "firm = {row.id for row in run.checkpoints}"),
    ),
    mutant(
        "A6",
        "what an agent has seen committed it does not replace while metadata is out",
        ("agent/domain/slot_rules.py", "not (read or heard(state, shard) or", "not (read or"),
    ),
    mutant(
        "given-up",
        "steps that can never be whole, or never be acknowledged, give their slots up",
        ("metadata/domain/abandoned_steps.py", "*_lost(run, nodes, evidence), *_piled(run, nodes, evidence),", "*(),"),
    ),
    mutant(
        "given-up: unlike",
        "a step whose ranks shared out other tensors is given up",
        ("metadata/domain/abandoned_steps.py", ", *_unlike(run, evidence))", ")"),
    ),
    mutant(
        "kept-freed",
        "the checkpoint that is kept is not freed itself",
        ("agent/domain/slot_rules.py", "(shard.step, shard.generation) < (keep.step, keep.generation)",
         "(shard.step, shard.generation) <= (keep.step, keep.generation)"),
    ),
    mutant(
        "pin-agent",
        "an agent frees nothing that is pinned: it drains, or is restored",
        ("agent/domain/slot_rules.py", "spent(state, view, shard) and not _kept(view, shard)",
         "spent(state, view, shard)"),
    ),
    # -- restore ---------------------------------------------------------------------------------
    mutant(
        "unheard",
        "nothing is decided before the nodes with a lease, or a rank, have reported",
        ("metadata/domain/restore_decision.py",
         "if awaited_reports(run, facts.nodes, facts.now_s, facts.limits):", "if False:"),
    ),
    mutant(
        "late-news",
        "a proposal gives way to a newer step that a node brings late",
        ("metadata/domain/restore_decision.py", "key > chosen and", "False and"),
    ),
    mutant(
        "restarting",
        "a source that went silent is awaited: it may be restarting",
        ("metadata/domain/restore_decision.py",
         "hoped = any(key not in run.rejected and whole(_hoped(key, facts)) for key in known)",
         "hoped = False"),
        ("metadata/domain/restore_decision.py", "copies = _hoped(chosen, facts)",
         "copies = facts.evidence.sources.get(chosen, {})"),
    ),
    mutant(
        "M2",
        "a confirmed decision never changes",
        ("metadata/domain/restore_decision.py", "if run.deciding:\n        return _choose_or",
         "if run.deciding or decision.checkpoint:\n        return _choose_or"),
        ("metadata/domain/restore_decision.py", "if decision.state is DecisionState.PROPOSED:",
         "if decision.state in (DecisionState.PROPOSED, DecisionState.CONFIRMED):"),
    ),
    mutant(
        "M3",
        "confirming leaves later steps of older generations behind",
        ("metadata/domain/restore_decision.py", "changed = moved(changed, lines.to(chosen, attempt.generation))",
         "changed = rewind(changed, chosen.step)"),
    ),
    mutant(
        "pin-proposal",
        "what is proposed is pinned, so nobody may expire it",
        ("metadata/domain/restore_decision.py", "decision=proposed, pins=(chosen,))",
         "decision=proposed, pins=())"),
        ("metadata/domain/holds.py", "if run.decision and (run.deciding or run.loading) else",
         "if False else"),
    ),
    mutant(
        "pin-loading",
        "what is confirmed stays pinned until all ranks have loaded it",
        ("metadata/domain/restore_decision.py",
         "    if not run.loading:\n        return Outcome(run=replace(run, pins=(), rejected=())",
         "    if True:\n        return Outcome(run=replace(run, pins=(), rejected=())"),
        ("metadata/domain/holds.py", "(run.deciding or run.loading)", "run.deciding"),
    ),
    mutant(
        "unhashed",
        "a rank is ready when all shards were hashed since the proposal",
        ("agent/domain/restore_readiness.py",
         "if held is not None and held.verified_decision == decision.number else",
         "if held is not None else"),
    ),
    mutant(
        "quarantine",
        "a copy that does not match its digest is used no more",
        ("agent/domain/event_handling.py",
         "held = slot.content.held if event.intact else HeldState.QUARANTINED",
         "held = slot.content.held"),
    ),
    mutant(
        "start-twice",
        "a start is made once per name",
        ("metadata/domain/attempt_start.py", "return start is not None and start.name not in run.started",
         "return start is not None"),
    ),
    # -- the object store ------------------------------------------------------------------------
    mutant(
        "M6",
        "what a restore has left behind goes no further to the object store",
        ("metadata/domain/drains.py", "left_behind = not run.usable(drain.checkpoint)",
         "left_behind = False"),
    ),
    mutant(
        "durable-early",
        "durable comes after all shards: items, plan, worker and claim look at it",
        ("metadata/domain/worker_plans.py", "if not drain.missing:", "if True:"),
        ("metadata/domain/worker_plans.py", "row.draining and known.missing_count == 0", "row.draining"),
        ("metadata/usecases/workers.py", "if drain.missing:", "if False:"),
        ("persistence/manifest.py", "    _check_shards(folder, mine.shards, pool, stop)\n", ""),
    ),
    mutant(
        "manifest-unchecked",
        "a manifest that is asked for too early is not written: its shards are looked for first",
        ("metadata/domain/worker_plans.py", "if not drain.missing:", "if True:"),
        ("metadata/domain/worker_plans.py", "row.draining and known.missing_count == 0", "row.draining"),
        ("persistence/manifest.py", "    _check_shards(folder, mine",
         "    publish(folder, mine, repair=True), _check_shards(folder, mine"),
    ),
    mutant(
        "manifest-again",
        "a manifest that is there is not written over",
        ("sdk/holdfast/bucket/publish.py",
         "store.put(key, data, if_absent=True)", "store.put(key, data)"),
    ),
    mutant(
        "unproven",
        "an object without its sidecar is read back before it is believed",
        ("persistence/domain/existing_object.py",
         "return Verdict.DONE if sidecar == shard else Verdict.PROVE", "return Verdict.DONE"),
    ),
    mutant(
        "not-ours",
        "what another catalogue's manifest relies on is not written over",
        ("persistence/upload.py", "if self._shard not in manifest.shards:", "if False:"),
    ),
    mutant(
        "N10",
        "what was seen before a registration is there when it is written",
        ("metadata/usecases/agents.py", "if not _is_there(catalogue, wish)}", "if False}"),
    ),
    mutant(
        "N11",
        "a catalogue that has just come decides nothing before agents had time to report",
        ("metadata/domain/restore_decision.py",
         "listens = facts.now_s < facts.listens_until_s", "listens = False"),
    ),
    mutant(
        "N12",
        "what drains by an older catalogue is durable if its manifest is there",
        ("metadata/domain/rows_from_manifests.py", "elif row.draining and", "elif False and"),
    ),
    Mutant(
        "N13",
        "a rank takes a decision for its own attempt's number only",
        (Change("sdk/holdfast/core/session.py",
                "return self.decision.generation == generation", "return True"),),
    ),
    mutant(
        "N17",
        "a node that a copy is of and that a catalogue has never heard of is awaited",
        ("metadata/domain/restore_decision.py", "if hoped or _unheard_of(run, attempt, facts):",
         "if hoped:"),
    ),
    mutant(
        "needs-told",
        "a node is told of, and fetches, what its ranks need and nothing else",
        ("metadata/domain/needed_shards.py", "if not all(status.names_needs for status in mine) or",
         "if mine or"),
    ),
    mutant(
        "needs-here",
        "a rank is ready once all is here that it named, not what its node was told of",
        ("agent/domain/restore_readiness.py", "return known if len(known) == len(shards) else None",
         "return known"),
    ),
    mutant(
        "parts-wanted",
        "parts of a shard are fetched for the ranks that wait for them, all of it for nobody else",
        ("agent/domain/wanted_parts.py", "return parts if parts != every else None", "return None"),
    ),
    mutant(
        "parts-private",
        "parts that come for a restore are not the copy that an owner asked for",
        ("agent/shell.py", "event.name.state is SlotState.PARTIAL", "False"),
        ("agent/domain/event_handling.py",
         "if event.name.state is not SlotState.PARTIAL and state.holds.pop(",
         "if state.holds.pop("),
    ),
    mutant(
        "parts-once",
        "parts serve one proposal: those of an earlier one go",
        ("agent/domain/wanted_parts.py", "if held.verified_decision != view.decision.number:",
         "if False:"),
    ),
    mutant(
        "parts-go",
        "parts go once they are loaded",
        ("agent/domain/next_actions.py",
         "if wanted and not wanted.serve(state, slot)", "if False"),
    ),
    mutant(
        "scrub-revives",
        "no manifest is written again after its checkpoint has expired",
        ("persistence/scrub.py", "        check_kept()\n", ""),
    ),
    mutant(
        "manifest-last",
        "what is collected loses its manifest first",
        ("persistence/collect.py",
         "freed = _manifest(store, keys.manifest_key(job, checkpoint))\n", "freed = 0\n"),
        ("persistence/collect.py", "    freed += delete_below(store, prefix, stop)\n",
         ("    last = keys.manifest_key(job, checkpoint)\n"
          "    store.delete([e.key for e in store.list(prefix) if e.key != last])\n"
          "    freed += delete_below(store, prefix, stop)\n")),
    ),
    mutant(
        "adopt-rules",
        "what the bucket's manifests have left behind is not chosen by a new catalogue",
        ("metadata/domain/rows_from_manifests.py", "lineage.moves(manifests, rollbacks)",
         "lineage.moves((), rollbacks)"),
    ),
    mutant(
        "rollback-leaves",
        "a rollback leaves behind what came after, in its own transaction",
        ("metadata/domain/rollback.py", "bare.after(*since, lines.to(row.id, generation))",
         "bare.after(*since)"),
    ),
    mutant(
        "rollback-fences",
        "a rollback has a generation of its own, above the attempt that trained",
        ("metadata/domain/rollback.py", "generation = run.generation + 1", "generation = run.generation"),
    ),
    mutant(
        "rollback-takes-up",
        "going back to what was left takes its line up again",
        ("sdk/holdfast/core/lines.py", "    if not _is_left(before[-1], move):\n", "    if True:\n"),
        ("sdk/holdfast/core/lines.py", "    if _is_left(caps, move):\n        return None\n", ""),
    ),
    mutant(
        "rollback-record",
        "a catalogue that was lost finds in the bucket what the run was rolled back to",
        ("metadata/domain/rows_from_manifests.py", "lineage.moves(manifests, rollbacks)",
         "lineage.moves(manifests)"),
    ),
    mutant(
        "rollback-drains",
        "what a rollback leaves behind does not become durable",
        ("metadata/domain/rollback.py", "return without_left(there)", "return Outcome(run=there)"),
    ),
    mutant(
        "M7-pin",
        "a user's pin is not expired by the policy, nor by the statement",
        ("metadata/domain/holds.py",
         '() if item.pin is None else (f"pinned: {item.pin}" if item.pin else "pinned",)', "()"),
        ("metadata/storage/holds.py", "(t.pins, t.user_pins, t.drains)", "(t.pins, t.drains)"),
    ),
    mutant(
        "M7-read",
        "what somebody reads is not expired by the policy, nor by the statement",
        ("metadata/domain/holds.py", 'found = [f"read by {reader}" for reader in item.readers]', "found = []"),
        ("metadata/storage/holds.py", "t.reads.c.until_s > now_s", "t.reads.c.until_s < 0"),
    ),
    mutant(
        "M7-newest",
        "retention counts from the newest checkpoint and never takes it",
        ("metadata/domain/retention.py",
         "ordered = sorted(stored, key=lambda item: item.id, reverse=True)",
         "ordered = sorted(stored, key=lambda item: item.id)"),
    ),
    mutant(
        "M7-behind",
        "what was left behind is none of the newest that retention keeps",
        ("metadata/domain/retention.py", "return not self.superseded and not self.bad", "return not self.bad"),
    ),
    mutant(
        "M7-remove",
        "nobody removes the newest that can be restored, but by force",
        ("metadata/domain/holds.py", "if item.id == newest:", "if False:"),
    ),
)  # fmt: skip

"""The guards of room and of copies: what is let go, and what is brought where, each as a mutant.

Each change names text that is in its file once.
"""

from __future__ import annotations

from tests.simulation.mutant import mutant

OF_ROOM = (
    mutant(
        "N1 room: copies",
        "a backup refuses more steps of a rank than its owner has slots for",
        ("agent/domain/making_room.py", "+ coming >= held_max:", "+ coming >= 99:"),
    ),
    mutant(
        "room: one copy",
        "a copy is kept until all of the next step is there and acknowledged, and not until it comes",
        ("agent/domain/slot_rules.py", "if key.step < shard.step and replaceable(state, slot)]",
         "if key.step < shard.step]"),
        ("agent/domain/next_actions.py",
         ("    if making_room.free_slot(state, length) or making_room.to_drop(state, length) is not None:\n"
          "        return []\n    passed"), "    passed"),
    ),
    mutant(
        "drain: slot",
        "the slot of what drains is for no other step: no more wait than backups have room for",
        ("agent/domain/slot_rules.py",
         "slots = saving_slots(session.reservation.slots, persist=session.spec.persist.on)",
         "slots = session.reservation.slots"),
    ),
    mutant(
        "drain: lost owner",
        "what another node keeps for a lost owner makes room",
        ("metadata/domain/copies_to_fetch.py", "lost = drains and item.owner", "lost = False and item.owner"),
    ),
    mutant(
        "drain: two slots",
        "what drains makes room for a restore where its rank has no slot for it",
        ("metadata/domain/copies_to_fetch.py", "for drain in run.drains[:more]]", "for drain in run.drains]"),
    ),
    mutant(
        "drain: copies",
        "copies of what drains, but for its keeper's, make room for a restore",
        ("metadata/domain/copies_to_fetch.py", "if drains and item.owner == host and shard.checkpoint in firm:",
         "if shard.checkpoint in firm:"),
    ),
    mutant(
        "drain: kept",
        "one holder of each shard keeps what drains",
        ("agent/domain/slot_rules.py", "shard.checkpoint in view.pinned or shard in view.drained",
         "shard.checkpoint in view.pinned"),
    ),
    mutant(
        "drain: silent",
        "a drain whose keeper is gone gives way to a later step that is there to go",
        ("metadata/domain/drains.py", "(awaited(node, now_s) if another else", "(_awaited_long(node, now_s) if another else"),
    ),
    mutant(
        "N14",
        "through an outage that began as a commit was told backups go on as its owners do",
        ("agent/domain/making_room.py", "more = bool(state.lost) and any(", "more = False and any("),
    ),
    mutant(
        "N15",
        "a step that its owner has replaced gives its slot up to a later one that is firm",
        ("metadata/domain/abandoned_steps.py", "return any(item.owner not in item.nodes for item in copies.values())", "return False"),
    ),
    mutant(
        "N2 room: spares",
        "copies beyond the policy make room",
        ("metadata/domain/node_view.py", "        if run.id in held:\n            awaits",
         "        if False:\n            awaits"),
    ),
    mutant(
        "N3 room: older",
        "while a restore is decided what is older than the acknowledged step makes room",
        ("metadata/domain/copies_to_fetch.py", "return _is_before(key, kept) or key in parts", "return key in parts"),
    ),
    mutant(
        "N16 room: parts",
        "while a restore is decided what is older and nowhere whole makes room",
        ("metadata/domain/copies_to_fetch.py", "return _is_before(key, kept) or key in parts", "return _is_before(key, kept)"),
    ),
    mutant(
        "N18 room: behind",
        "once what is chosen lies as asked, second copies of what is older make room for it",
        ("metadata/domain/copies_to_fetch.py", "safe = chosen is not None and", "safe = False and"),
    ),
    mutant(
        "N22 room: local",
        "of an older step that was only local second copies make room for what is chosen",
        ("metadata/domain/copies_to_fetch.py", "(safe or shard.checkpoint in local)", "safe"),
    ),
    mutant(
        "N24 room: later",
        "what is newer than what is chosen and nowhere whole makes room once nobody is awaited",
        ("metadata/domain/copies_to_fetch.py", "(key.generation < run.generation and not awaits)",
         "False"),
    ),
    mutant(
        "room-awaited",
        "what is newer than what is chosen and nowhere whole stays while a node may bring the rest",
        ("metadata/domain/copies_to_fetch.py", "key.generation < run.generation and not awaits",
         "key.generation < run.generation"),
    ),
    mutant(
        "room: lying",
        "where nothing is known as acknowledged, what is older than a step that lies as asked makes room",
        ("metadata/domain/copies_to_fetch.py", "(acknowledged(run) or _lying(run, evidence, chosen, live))", "acknowledged(run)"),
    ),
    mutant(
        "room: lying once",
        "where no copies are asked for nothing is older than a step that nobody has acknowledged, nor read",
        ("metadata/domain/copies_to_fetch.py", "if not asked.losses:", "if False:"),
    ),
    mutant(
        "repair-newest",
        "copies of the newest step are made up before those of the one that is kept",
        ("metadata/domain/copies_to_fetch.py", "(newest, run.parent, kept) if key",
         "(kept, newest, run.parent) if key"),
    ),
    mutant(
        "N27 room: misplaced",
        "what takes a proposed restore's room and is placed on other nodes is brought there",
        ("metadata/domain/copies_to_fetch.py", "if decision and run.deciding else None", "if False else None"),
    ),
    mutant(
        "room: misplaced newer",
        "so is what is newer than what is proposed",
        ("metadata/domain/copies_to_fetch.py", "item is None or key in staying or", "item is None or key in staying or not _is_behind(key, chosen) or"),
    ),
    mutant(
        "room: misplaced chain",
        "so is, once one node lacks room, what is misplaced on the others",
        ("metadata/domain/copies_to_fetch.py", "        for host, items in moved.items()\n",
         "        for host, items in moved.items()\n        if _lacks_room(run, evidence, where.live, host, spared[host])\n"),
    ),
    mutant(
        "room: repair-leases",
        "copies that are made up while a restore goes on take back idle leases, as it does itself",
        ("agent/domain/fetch_wishes.py", "restore or is_restoring(state, want.shard.id.run)", "restore"),
    ),
    mutant(
        "N28 repair: restored",
        "copies of what was restored are made up though a newer step is committed",
        ("metadata/domain/copies_to_fetch.py", "(newest, run.parent, kept) if key", "(newest, kept) if key"),
    ),
    mutant(
        "N25 owner: again",
        "an owner that gets its shard back from another node is its owner again",
        ("metadata/domain/copies_to_fetch.py", "reason=reason, owner=item.owner)", "reason=reason)"),
    ),
    mutant(
        "repair-placed",
        "a copy is brought to where the rule places it though others hold as many as asked",
        ("metadata/domain/copies_to_fetch.py", "in placed if node not in item.nodes)", "in placed if node not in item.nodes)[: asked.missing(item.nodes, domains)]"),
    ),
    mutant(
        "N23 parts: repair",
        "a shard that is loaded in parts is asked for as a lost copy too",
        ("metadata/domain/node_view.py", "*all_of_it.repairs[run.id].get(name, ()), *early)",
         ("*(lost for lost in all_of_it.repairs[run.id].get(name, ()) if lost.shard not in "
          "[want.shard for want in wanted]), *early)")),
    ),
    mutant(
        "N4 room: leases",
        "a lease of a rank that has not begun makes room for its restore",
        ("agent/domain/next_actions.py", "slot = making_room.idle_lease(state)", "slot = None"),
    ),
    mutant(
        "N5 room: quarantined",
        "a copy that is bad makes room",
        ("agent/domain/making_room.py",
         "if slot.content.held is HeldState.QUARANTINED:", "if False:"),
    ),
)  # fmt: skip

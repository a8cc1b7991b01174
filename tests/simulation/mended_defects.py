"""Defects that were mended, each as a mutant in which it is back, under its old name.

What several guards keep by now takes all of them away. Each change names text that is in its file
once.
"""

from __future__ import annotations

from tests.simulation.mutant import mutant

DEFECTS = (
    mutant(
        "A1",
        "what a lost catalogue numbered is above the attempt that gets the number again",
        ("metadata/domain/advance_run.py", "used = run.deciding and", "used = False and"),
        ("metadata/domain/attempts.py", "max(run.generation, wish.generation_min) + 1",
         "run.generation + 1"),
    ),
    mutant(
        "A4",
        "a node that is late with something newer is awaited, and what it brings is proposed",
        ("metadata/domain/restore_decision.py", "if candidates and candidates[0] >= max(_seen(run, facts)):",
         "if candidates:"),
        ("metadata/domain/restore_decision.py", "key > chosen and", "False and"),
    ),
    mutant(
        "A5",
        "two supersede rules are never made one that covers more (at 2 rules, not 1024)",
        ("sdk/holdfast/core/lines.py", "    return tuple(rules[-MOVES_PER_RUN_MAX:])\n",
         ("    if len(rules) > 2:\n"
          "        one, two, *rules = rules\n"
          "        step = min(one.after_step, two.after_step)\n"
          "        rules.insert(0, SupersedeRule(after_step=step, below_generation=two.below_generation))\n"
          "    return tuple(rules)\n")),
    ),
    mutant(
        "A7",
        "a durable checkpoint that nobody spoke of for long is no new one (at 2 rows, not 8)",
        ("metadata/usecases/agents.py", "catalogue.with_rows(run, spoken | told)", "run"),
        ("metadata/storage/checkpoints.py", "DURABLE_ROWS_IN_RUN_MAX = 8",
         "DURABLE_ROWS_IN_RUN_MAX = 2"),
        ("metadata/storage/checkpoints.py",
         'func.coalesce(func.nullif(c.notes, ""), new.notes)', "new.notes"),
        ("metadata/domain/drains.py", "row.id in new and row.id.step > run.persisted_step",
         "row.id in new"),
    ),
    mutant(
        "A9",
        "the bucket is looked at also for a job that the catalogue knows",
        ("metadata/calls/catalogue_from_bucket.py",
         "listed = [place for place in listed if place.checkpoint.run == here.run]", "listed = []"),
    ),
    mutant(
        "B1",
        "an attempt that another replaces within one batch keeps its number",
        ("metadata/usecases/agents.py", "known = catalogue.generation_of(job, wish.spec.nonce)",
         ("known = catalogue.generation_of(job, wish.spec.nonce)\n"
          "            if run.attempt and run.attempt.spec.nonce == wish.spec.nonce:\n"
          "                known = run.attempt.generation")),
        ("metadata/usecases/agents.py", "if known is None:", "if False:"),
    ),
    mutant(
        "B2",
        "leases come back to now when the database's clock steps back",
        (
            "metadata/usecases/agents.py",
            "if before_s - now_s > CLOCK_BACK_S_MIN and",
            "if False and",
        ),
    ),
    mutant(
        "C29",
        "who has sealed nothing has not lost step 0",
        ("metadata/domain/abandoned_steps.py", "had = said.sealed_before > key.step", "had = said.sealed_before >= key.step"),
    ),
    mutant(
        "Q1",
        "claims and delays of the queue come back to now when its clock steps back",
        ("kit/queue/sqlite.py", " OR due_s > {_NOW} + {FAR_S})", ")"),
    ),
    mutant(
        "X0",
        "saves go on while metadata is out, in the slots of uncommitted steps",
        ("agent/domain/next_actions.py", "slot = slot_rules.gives_way(state, session)", "slot = None"),
    ),
    mutant(
        "X9",
        "replicated means as many copies as were asked for, not as nodes allow",
        ("metadata/domain/commit_rule.py", "spread(attempt.protection, copies, places, stripes)",
         "spread(attempt.allowed, copies, places, stripes)"),
    ),
)  # fmt: skip

"""What no party knows: which bytes were closed, sealed and committed under which name, and when.

From that follows what P5 owes: ``floor`` is acknowledged, ``hope`` is committed at least; either
can be put together from what lies in memory and bucket, until something destroys it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.simulation import checks
from tests.simulation.checks import Broken, age, name
from tests.simulation.left_behind import LeftBehind
from tests.simulation.losses import is_safe, steps_given_up
from tests.simulation.plan import NODE_LEASE_S
from tests.simulation.segments import JOB, moment_of, root

from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.core.inventory import HeldState, Inventory
from holdfast.core.node_view import WantReason
from holdfast.core.shard import Shard
from holdfast.core.stripes import Stripe
from holdfast.errors import NotFoundError
from holdfast.format import keys
from holdfast_services.agent.domain import HeldSum
from holdfast_services.agent.domain import events as ev
from holdfast_services.metadata.domain.holds import Listed
from holdfast_services.metadata.domain.model import Attempt, Run

if TYPE_CHECKING:
    from tests.simulation.bucket import Bucket
    from tests.simulation.node import File, Node
    from tests.simulation.world import World

SILENT_S_MAX = 3.0
"""A node that metadata heard of at least so often is there: its lease held all the time."""
SETTLED_S = 1.0
"""What has lain in a node for so long was told."""


class Ghosts:
    """The memory of one history.

    ``safe`` is the newest that was acknowledged with all copies asked for, until something is lost;
    ``losses`` are the nodes that the policy lets go.
    """

    losses = 0

    def __init__(self, world: World) -> None:
        self.world = world
        self.nodes: dict[str, Node] = {}
        self.bucket: Bucket | None = None
        self.closed: dict[CheckpointId, dict[int, set[int]]] = {}
        self.world_sizes: dict[CheckpointId, int] = {}
        self.sealed_on: dict[tuple[CheckpointId, int], set[str]] = defaultdict(set)
        self.elements_on: dict[Stripe, set[tuple[int, str]]] = defaultdict(set)
        self.digests: dict[tuple[CheckpointId, int], set[bytes]] = defaultdict(set)
        self.committed: set[CheckpointId] = set()
        self.proposed: set[CheckpointId] = set()
        self.acknowledged: set[CheckpointId] = set()
        self.manifests: dict[CheckpointId, float] = {}
        self.gone: set[CheckpointId] = set()
        self.notes: dict[CheckpointId, str] = {}
        self.left = LeftBehind()
        self.going_back: CheckpointId | None = None  # to which a user rolls back now
        self.floor: CheckpointId | None = None
        self.hope: CheckpointId | None = None
        self.safe: CheckpointId | None = None
        self.numbers: dict[int, bytes] = {}
        self.generations: dict[bytes, int] = {}
        self.began: dict[bytes, CheckpointId | None] = {}
        self.sharded = self.ranged = False
        self.named: dict[tuple[str, CheckpointId], set[int]] = defaultdict(set)
        self.widened: set[tuple[str, CheckpointId]] = set()
        """Whose shards the ranks of a node have ever named, if the job is ``sharded``."""
        self.commits_count = 0
        self.lost_count = 0
        self.restores_count = 0
        self.living: set[bytes] = set()  # attempts that have not ended
        self.moved = True  # a file has changed since the states were judged
        self.forcing = False
        self.clock_stepped_s = -1e9
        self.store_troubled_s = -1e9
        self._seen: dict[str, CheckpointId] = {}
        self.destroyed_count = 0
        self._starts: set[str] = set()
        """Names of starts that were made."""
        self._replaced: set[CheckpointId] = set()
        self._heard: dict[str, tuple[int, int]] = {}
        self._heard_s: dict[str, list[float]] = defaultdict(list)
        self._attempts_s: dict[bytes, float] = {}
        self._told: dict[str, tuple[float, Inventory]] = {}
        """What the catalogue knows of each node, and since when; before this transaction."""
        self._news: dict[str, Inventory] = {}
        self._changes: list[tuple[Run, Run]] = []

    # -- what ranks and agents do ------------------------------------------------------------------

    def close(self, key: ShardId, world_size: int, lineage: int) -> None:
        """A rank has closed a segment."""
        closed = self.closed.setdefault(key.checkpoint, {})
        closed.setdefault(int(key.rank), set()).add(lineage)
        self.world_sizes[key.checkpoint] = world_size
        self.moved = True

    def seal(self, node: str, shard: Shard) -> None:
        """A node has a sealed copy."""
        key = shard.id
        self.sealed_on[key.checkpoint, int(key.rank)].add(node)
        self.digests[key.checkpoint, int(key.rank)].add(shard.root_digest)
        self.moved = True

    def sum_up(self, node: str, held: HeldSum) -> None:
        """A node has made an element."""
        self.elements_on[held.element.stripe].add((held.element.number, node))
        self.moved = True

    def seat(self, nonce: bytes, generation: int) -> None:
        """M1: one number, one attempt, for ever."""
        if self.numbers.setdefault(generation, nonce) != nonce:
            raise Broken(f"M1: generation {generation} was given to two attempts")
        if self.generations.setdefault(nonce, generation) != generation:
            raise Broken(f"M1: an attempt was given generations {self.generations[nonce]} and "
                         f"{generation}")  # fmt: skip

    def begin(self, nonce: bytes, decision: Decision) -> None:
        """P2: all ranks of an attempt begin with the same."""
        what = None if decision.fresh else decision.checkpoint
        if self.began.setdefault(nonce, what) != what:
            raise Broken(f"P2: of one attempt ranks began with {name(self.began[nonce])} and "
                         f"{name(what)}")  # fmt: skip

    def load(
        self, decision: Decision, found: dict[int, bytes], wanted: set[int]
    ) -> tuple[int, int]:
        """P1, P3, S3, G8: a rank loads these bytes; return lineage and step that they are of."""
        key = decision.checkpoint
        if decision.state is not DecisionState.CONFIRMED or key is None:
            raise Broken(f"S3: loaded by a decision that is {decision.state.name}")
        self.restores_count += 1
        moments = {rank: moment_of(data) for rank, data in found.items()}
        if set(found) != wanted or any(m.rank != rank for rank, m in moments.items()):
            raise Broken(f"P1: {name(key)} was loaded from ranks {sorted(found)}")
        if len({(m.lineage, m.step) for m in moments.values()}) != 1:
            raise Broken(f"P1: what was loaded as {name(key)} is of several moments: {moments}")
        first = next(iter(moments.values()))
        if first.step != key.step:
            raise Broken(f"G8: {name(key)} has the bytes of step {first.step}")
        return first.lineage, first.step

    def fetched(self, node: Node, fetch: ev.Fetch) -> None:
        """P8: a node fetches for a restore what one of its ranks needs, and nothing else."""
        state, shard = node.state, fetch.shard
        reasons = {
            want.reason
            for want in (state.view.wants if state and state.view else ())
            if want.shard.id == shard.id
        }
        # A view may be older than what the owner asks for.
        restored = not fetch.asked and reasons == {WantReason.RESTORE}
        key = shard.id.checkpoint
        if restored and self.sharded and shard.id.rank not in self.named[node.name, key]:
            raise Broken(f"P8: {node.name} fetches rank {shard.id.rank} of {name(key)}, which none "
                         f"of its ranks needs")  # fmt: skip
        part = self.ranged and (node.name, key) not in self.widened
        if restored and part and not fetch.parts:
            raise Broken(f"P8: {node.name} fetches all of rank {shard.id.rank} of {name(key)}, of "
                         f"which its ranks need a part")  # fmt: skip

    def view_arrived(self, kept: CheckpointId | None) -> None:
        """M9: what is named as kept was acknowledged."""
        if kept is not None and kept not in self.acknowledged:
            raise Broken(f"M9: free_before is {name(kept)}, which was never acknowledged")

    def replaced(self, node: str, key: CheckpointId) -> None:
        """A6: an agent that cannot reach metadata gives up what it has not said it knows of."""
        self._replaced.add(key)
        seen = self._seen.get(node)
        if seen is not None and age(key) <= age(seen):
            raise Broken(f"A6: {node} replaced a part of {name(key)}, and had said it has seen "
                         f"{name(seen)}")  # fmt: skip
        if key == self.hope:
            self.hope = self.floor

    # -- what metadata writes ----------------------------------------------------------------------

    def saved(self, before: Run, after: Run, _catalogue: Any) -> None:
        """A run is written, in a transaction that may still fail."""
        self._changes.append((before, after))

    def forget_changes(self) -> None:
        """A transaction begins."""
        self._changes.clear()
        self._news.clear()

    def judge(self) -> None:
        """A transaction is committed."""
        for before, after in self._changes:
            self._attempt(after)
            self._rollback(before, after)
            self._rows(before, after)
            self._decision(before, after)
            for check in checks.TRANSITIONS:
                check(self, before, after)
        self._changes.clear()
        self._told.update({node: (self.world.now_s, item) for node, item in self._news.items()})

    def heard(self, item: Inventory) -> None:
        """M4: an inventory replaces only one that is older."""
        key, node = (item.incarnation, item.sequence), item.node.node
        if key < self._heard.get(node, (-1, -1)):
            raise Broken(f"M4: inventory {key} of {node} came after {self._heard[node]}")
        self._heard[node] = key
        self._news[node] = item
        for seen in item.seen:
            self._seen[node] = self._later(self._seen.get(node), seen)
        self._heard_s[node].append(self.world.now_s)

    def expired(self, key: CheckpointId, listed: Sequence[Listed], run: Run | None) -> None:
        """M7: nothing that is pinned, read, draining or the newest to go back to expires."""
        item = next(item for item in listed if item.id == key)
        if item.pin is not None or item.readers or item.row.draining:
            raise Broken(f"M7: {name(key)} expired, though it was pinned, read or draining")
        usable = [o for o in listed if o.row.stored and run and run.usable(o.id)]
        newest = max((o.id for o in usable), default=None)
        if key == newest and not self.forcing:
            raise Broken(f"M7: {name(key)} expired, the newest in the object store")
        self.gone.add(key)
        self.survey(without=key)

    def catalogue_went_back(self) -> None:
        """The database is an older one, or empty: what it alone knew is forgotten."""
        self.notes.clear()
        self.numbers.clear()
        self.generations.clear()
        self._heard.clear()
        self._told.clear()
        self.left.forget()
        self._starts.clear()
        self.safe = None  # what a backup's inventories acknowledge may not lie there any more

    def _attempt(self, run: Run) -> None:
        if run.attempt is not None:
            self._attempts_s.setdefault(run.attempt.spec.nonce, self.world.now_s)

    def _rollback(self, before: Run, after: Run) -> None:
        if self.going_back is not None and after.moves != before.moves:
            self.left.roll_back(self.going_back, before.generation + 1)
            self.floor, self.hope, self.safe = self.going_back, self.going_back, None
            self.survey()

    def _rows(self, before: Run, after: Run) -> None:
        known = {row.id for row in before.checkpoints}
        firm = {row.id for row in before.checkpoints if row.acknowledged}
        # The oldest first: older ones go for the last that is acknowledged, whatever its bytes are.
        for row in reversed(after.checkpoints):
            if not after.usable(row.id):
                continue
            if row.id not in known and row.id.generation == after.generation:
                self.committed.add(row.id)
                self.commits_count += 1
                kept = row.id not in self._replaced and not self._is_spent(row.id)
                if kept and self._is_there(row.id):
                    self.hope = self._later(self.hope, row.id)
            if row.acknowledged and row.id not in firm:
                self.acknowledged.add(row.id)
                if self.safe is None or age(self.safe) <= age(row.id):
                    self.safe = row.id if is_safe(self, row) else None
                if self._is_there(row.id):
                    self.floor = self._later(self.floor, row.id)
                    self.hope = self._later(self.hope, row.id)
                elif self.floor and age(self.floor) < age(row.id):
                    # Nobody knows that it is not what it was: older ones go for it.
                    self.floor = self.hope = None
                    self.survey()
        given_up = steps_given_up(self, after)
        if self.hope and (self.hope.step, self.hope.generation) in given_up:
            self.hope = self.floor

    def _is_there(self, key: CheckpointId) -> bool:
        """P1: what is committed is somewhere, unless something was destroyed since it was told.

        What is older than the acknowledged, or left behind, may have been freed: an inventory that
        was on its way while the catalogue was lost, or is in its backup, tells an older one of it.
        So may what is older than a step that is proposed and lies as the policy asks: it was spare,
        and not all have said that it went.
        """
        there = self.whole(key)
        freed = self.floor is not None and age(key) < age(self.floor)
        freed = freed or not self.in_line(key) or self.whole_from(key)
        if not (there or freed or self.destroyed_count or key in self._replaced):
            raise Broken(f"P1: {name(key)} is committed, and not all of it is anywhere")
        return there

    def _is_spent(self, key: CheckpointId) -> bool:
        """Tell whether a later step was acknowledged: whoever comes late with ``key`` may free it.

        That step need not be there any more; a bit may have flipped in it.
        """
        return any(age(o) > age(key) and self.in_line(o) for o in self.acknowledged)

    def _later(self, one: CheckpointId | None, other: CheckpointId) -> CheckpointId:
        return other if one is None else max(one, other, key=age)

    def _decision(self, before: Run, after: Run) -> None:
        decision, attempt, old = after.decision, after.attempt, before.decision
        if decision is None or attempt is None:
            return
        if decision.checkpoint is not None:
            self.proposed.add(decision.checkpoint)
        if old is not None and (old.number, old.state) == (decision.number, decision.state):
            return
        # Else a catalogue from a backup decides for the dead.
        told = attempt.spec.nonce in self.living
        if decision.state is DecisionState.LOST:
            self.world.say(f"decision {decision.number} is LOST: {decision.reason}")
            if told and not decision.refused:
                self._expect_nothing(decision, attempt.spec.nonce)
        elif decision.state is DecisionState.CONFIRMED:
            asked = before.attempt and before.attempt.start_due and self._asks(attempt)
            self._confirmed(decision, attempt, judged=told and not asked)

    def _asks(self, attempt: Attempt) -> bool:
        """Tell whether an attempt asks for a start that was not made before: it is made once."""
        name = attempt.spec.start.name if attempt.spec.start else ""
        made = name in self._starts
        self._starts.add(name)
        return bool(name) and not made

    def _confirmed(self, decision: Decision, attempt: Attempt, *, judged: bool) -> None:
        what = None if decision.fresh else decision.checkpoint
        self.world.say(f"decision {decision.number}: generation {attempt.generation} begins with "
                       f"{name(what)}")  # fmt: skip
        again = attempt.spec.nonce in self.began
        if again and self.began[attempt.spec.nonce] != what:
            raise Broken(f"P6: taken in again with {name(what)}, it began with "
                         f"{name(self.began[attempt.spec.nonce])}")  # fmt: skip
        if judged and not again:
            self._expect_newest(what, attempt.spec.nonce)
        asked = self.store_troubled_s < self._attempts_s.get(attempt.spec.nonce, self.world.now_s)
        if what and self.left.must_know(what, asked=asked and not again):
            raise Broken(f"M3: {name(what)} was left behind, and is back")
        self.left.restore(what, attempt.generation)
        if not again:
            self.floor = self.hope = what
            if self.destroyed_count:  # a moment ago, maybe, and nobody has heard of it yet
                self.survey()

    # -- what P5 owes ------------------------------------------------------------------------------

    def _expect_nothing(self, decision: Decision, nonce: bytes) -> None:
        owed = self._owed(nonce, lost=True)
        if owed is not None:
            raise Broken(f"P5: told LOST ({decision.reason}), and {name(owed)} is there")
        self.floor = self.hope = None
        self.lost_count += 1

    def _expect_newest(self, what: CheckpointId | None, nonce: bytes) -> None:
        owed = self._owed(nonce)
        if owed is not None and (what is None or what.step < owed.step):
            raise Broken(f"P5: the decision is {name(what)}, and {name(owed)} is there")

    def _owed(self, nonce: bytes, *, lost: bool = False) -> CheckpointId | None:
        """Return the newest that the attempt must be given: whole with nodes that were heard.

        ``lost``: else it gets nothing, so that a node which went away meanwhile is awaited too.
        """
        began_s = self._attempts_s.get(nonce, self.world.now_s)
        if self.clock_stepped_s >= began_s - SILENT_S_MAX:
            return None
        since_s = max(began_s, self.world.now_s - SETTLED_S)
        there = {node for node in self.nodes if self._was_there(node, since_s)}
        asked = self.store_troubled_s < began_s
        owed = [
            k for k in (self.floor, self.hope)
            if k and (self.whole(k, there, stored=asked) or self._is_told(k, began_s, lost=lost))
        ]  # fmt: skip
        if asked:
            at_s = self.manifests
            owed += [k for k in at_s if at_s[k] < began_s and self.is_stored(k)]
        return max(owed, key=age, default=None)

    def _is_told(self, key: CheckpointId, began_s: float, *, lost: bool) -> bool:
        """Tell whether the catalogue knew where all of ``key`` is, and it is there.

        A node that went away before the attempt began is awaited as long as its lease; so is one
        that went later if all is ``lost`` without it.
        """
        found, now_s = set(), self.world.now_s
        for node, (at_s, item) in self._told.items():
            here = not item.leaving and now_s <= at_s + SILENT_S_MAX
            late = at_s >= began_s and not lost
            if not here and (late or now_s >= at_s + NODE_LEASE_S):
                continue
            good = [file.shard for file in self.nodes[node].files.values() if checks.good(file)]
            found |= {
                int(held.shard.id.rank) for held in item.shards
                if held.shard.id.checkpoint == key and held.state is HeldState.SEALED
                and held.shard in good
            }  # fmt: skip
        return bool(found) and found >= set(range(self.world_sizes[key]))

    def _was_there(self, node: str, since_s: float) -> bool:
        """Tell whether metadata has heard of a node all the time from before ``since_s``."""
        now_s = self.world.now_s
        times = [*self._heard_s[node], now_s]
        gaps = pairwise(times)
        if not self._heard_s[node] or self._heard_s[node][0] > since_s:
            return False
        return all(end - begin <= SILENT_S_MAX for begin, end in gaps if end >= since_s)

    def destroyed(self) -> None:
        """Something was lost that no promise covers: what is owed is found anew."""
        self.moved = True
        self.destroyed_count += 1
        self.safe = None
        self.survey()

    def survey(self, *, without: CheckpointId | None = None) -> None:
        """Find what is left of what was owed.

        Of older checkpoints only what is durable counts: their slots may be free any moment.
        """
        if self.floor is None or self.floor == without or not self.whole(self.floor):
            stored = [k for k in self.manifests if k != without and self.is_stored(k)]
            self.floor = max(stored, key=age, default=None)
        if self.hope is not None and (self.hope == without or not self.whole(self.hope)):
            self.hope = self.floor

    def is_stored(self, key: CheckpointId) -> bool:
        return key not in self.gone and self.in_line(key) and self.whole(key, ())

    def in_line(self, key: CheckpointId) -> bool:
        """Tell whether neither a restore nor a rollback has left ``key`` behind."""
        return not self.left.covers(key)

    def whole_from(self, key: CheckpointId) -> bool:
        """Tell whether ``key`` is whole, or a later one that was committed, or proposed.

        What is proposed was found whole, and more than one copy of what is older may go for it.
        """
        later = (o for o in self.committed | self.proposed if age(o) > age(key))
        return self.whole(key) or any(self.whole(other) for other in later)

    def whole(
        self, key: CheckpointId, there: Sequence[str] | set[str] | None = None, *,
        stored: bool = True,
    ) -> bool:  # fmt: skip
        """Tell whether every shard lies intact in the memory of a node, agent or not, or a bucket.

        Args:
            key: The checkpoint.
            there: Nodes that count, with what they have had for a while; None: all, at once.
            stored: The bucket counts.
        """
        shards: set[Shard] = set()
        elements: dict[Stripe, set[int]] = defaultdict(set)
        for file in self._lying(there):
            if file.shard and file.shard.id.checkpoint == key and checks.good(file):
                shards.add(file.shard)
            if file.element and checks.good_element(file):
                elements[file.element.element.stripe].add(file.element.element.number)
        found = {int(shard.id.rank) for shard in shards}
        for stripe, made in elements.items():
            if stripe.checkpoint != key:
                continue
            if len(shards.intersection(stripe.members)) + len(made) >= len(stripe.members):
                found |= {int(shard.id.rank) for shard in stripe.members}
        missing = set(range(self.world_sizes.get(key, 0))) - found
        if not missing or not stored or key not in self.manifests:
            return not missing
        return all(self._stored(key, rank) for rank in missing)

    def _lying(self, there: Sequence[str] | set[str] | None) -> Iterator[File]:
        """Yield the files of nodes; of those ``there`` what has lain there for a while."""
        for node in self.nodes.values():
            if there is not None and node.name not in there:
                continue
            for file in node.files.values():
                if there is None or file.since_s <= self.world.now_s - SETTLED_S:
                    yield file

    def _stored(self, key: CheckpointId, rank: int) -> bool:
        """Tell whether the bucket has the right bytes of a shard, and the manifest."""
        if self.bucket is None:
            return False
        size = self.world_sizes[key]
        shard = ShardId(RunId(key.run), Step(key.step), Generation(key.generation), Rank(rank))
        store = self.bucket.inside
        try:
            store.head(keys.manifest_key(JOB, key))
            data = store.get(keys.segment_key(JOB, shard, size), length_bytes_max=1 << 20)
        except NotFoundError:
            return False
        return root(data) in self.digests[key, rank]

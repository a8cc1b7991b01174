"""Nodes with their inventories, the pulse, events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import RowMapping, and_, bindparam, delete, func, insert, select, update

from holdfast.core.inventory import Inventory
from holdfast.core.text import holds_nul, tellable
from holdfast.core.user_events import Event
from holdfast.rpc.codec import from_message, to_message
from holdfast.v1 import metadata_pb2 as pb
from holdfast_services.kit.db import upsert
from holdfast_services.metadata import tables as t
from holdfast_services.metadata.domain.model import Node
from holdfast_services.metadata.storage.base import Statements

EVENTS_MAX = 10_000
NODE_SILENT_S_MAX = 7 * 24 * 3600.0

_N = t.nodes.c
# Each report and each tick runs these.
_PULSE = select(t.pulse.c.at_s, t.pulse.c.since_s)
_BEAT = update(t.pulse).where(t.pulse.c.at_s == bindparam("before_s"))
_NODES = select(_N.name, _N.incarnation, _N.sequence, _N.reported_at_s, _N.lease_until_s)
_INVENTORY = select(_N.inventory).where(_N.name == bindparam("node"))
_NODE_KEY = (
    select(_N.incarnation, _N.sequence, _N.lease_until_s)
    .where(_N.name == bindparam("node"))
    .with_for_update()
)
_NODE_ROW = ("incarnation", "sequence", "reported_at_s", "lease_until_s", "lost", "inventory")
_PUT_NODE = upsert(
    t.nodes,
    ["name"],
    lambda new: {name: new[name] for name in _NODE_ROW},
    lambda new: (
        (_N.incarnation < new.incarnation)
        | ((_N.incarnation == new.incarnation) & (_N.sequence <= new.sequence))
    ),
)
_MARK_LOST = (
    update(t.nodes)
    .where(_N.lease_until_s <= bindparam("now_s"), _N.lost.is_(False))
    .values(lost=True)
    .returning(_N.name)
)
_FORGET_NODES = delete(t.nodes).where(
    _N.lease_until_s < bindparam("before_s"), _N.reported_at_s < bindparam("before_s")
)
_PUT_EVENT = insert(t.events)
_FORGET_EVENTS = delete(t.events).where(
    t.events.c.id <= select(func.max(t.events.c.id)).scalar_subquery() - EVENTS_MAX
)


class NodeStatements(Statements):
    """Statements about nodes: one row per node, replaced in place."""

    # -- pulse ---------------------------------------------------------------------------------

    def pulse_s(self) -> float:
        """Return when a metadata process last wrote its pulse; 0: never."""
        return self.pulse()[0]

    def pulse(self) -> tuple[float, float]:
        """Return the last pulse, and since when pulses came without a gap; 0 at the very first."""
        at_s, since_s = self._db.execute(_PULSE).one()
        return float(at_s), float(since_s)

    def beat(self, before_s: float, now_s: float, since_s: float | None = None) -> bool:
        """Move the pulse from exactly ``before_s``; of several processes one succeeds.

        ``since_s``: a gap has ended then.
        """
        gap = {} if since_s is None else {"since_s": since_s}
        values = {"before_s": before_s, "at_s": now_s, **gap}
        return self._db.execute(_BEAT, values).rowcount == 1

    def extend_node_leases(self, since_s: float, until_s: float) -> None:
        """Give nodes whose lease held at ``since_s`` until ``until_s``; never shortens one."""
        n = t.nodes.c
        held = and_(n.lease_until_s >= since_s, n.lease_until_s < until_s)
        self._db.execute(update(t.nodes).where(held).values(lease_until_s=until_s))

    def extend_attempt_leases(self, since_s: float, until_s: float) -> None:
        """Give attempts whose lease held at ``since_s`` until ``until_s``; never shortens one."""
        a = t.attempts.c
        held = and_(a.lease_until_s >= since_s, a.lease_until_s < until_s)
        self._db.execute(update(t.attempts).where(held).values(lease_until_s=until_s))

    def extend_launcher_leases(self, since_s: float, until_s: float) -> None:
        """Give launchers whose lease held at ``since_s`` until ``until_s``; never shortens one."""
        c = t.launchers.c
        held = and_(c.lease_until_s >= since_s, c.lease_until_s < until_s)
        self._db.execute(update(t.launchers).where(held).values(lease_until_s=until_s))

    def bring_back(self, now_s: float, lease_s: float) -> None:
        """Bring times later than now back to now, and leases that are too long to their length.

        A report of the future becomes an old one: whether it came before an attempt began or
        after is not known any more, and the next one is not far.
        """
        latest = [
            (t.nodes.c.lease_until_s, now_s + lease_s, now_s + lease_s),
            (t.attempts.c.lease_until_s, now_s + lease_s, now_s + lease_s),
            (t.launchers.c.lease_until_s, now_s + lease_s, now_s + lease_s),
            (t.nodes.c.reported_at_s, now_s, now_s - lease_s),
            (t.attempts.c.started_at_s, now_s, now_s),
            (t.attempt_ranks.c.registered_at_s, now_s, now_s),
            (t.runs.c.announced_at_s, now_s, now_s),
            (t.pulse.c.since_s, now_s, now_s),
        ]
        for column, most, instead in latest:
            late = update(column.table).where(column > most)
            self._db.execute(late.values({column.name: instead}))

    # -- nodes ---------------------------------------------------------------------------------

    def nodes(self) -> Mapping[str, Node]:
        """Return every node as it last reported; decodes only what this process has not seen."""
        found: dict[str, Node] = {}
        rows = self._db.execute(_NODES).all()
        for name, incarnation, sequence, reported_at_s, lease_until_s in rows:
            inventory = self._cache.inventory(name, (incarnation, sequence)) or self._inventory(
                name
            )
            found[name] = Node(
                inventory=inventory, reported_at_s=reported_at_s, lease_until_s=lease_until_s
            )
        return found

    def _inventory(self, name: str) -> Inventory:
        """Return one node's inventory; rows are replaced in place, so it is whole."""
        body = self._db.execute(_INVENTORY, {"node": name}).scalar_one()
        inventory = from_message(_readable(pb.Inventory.FromString(body)), Inventory)
        self._cache.put_inventory(name, inventory)
        return inventory

    def node_key(self, name: str) -> tuple[int, int, float] | None:
        """Return (incarnation, sequence, lease) of a node and hold its row to the end."""
        row = self._db.execute(_NODE_KEY, {"node": name}).one_or_none()
        return (row[0], row[1], row[2]) if row else None

    def put_inventory(self, inventory: Inventory, now_s: float, lease_until_s: float) -> bool:
        """Replace the node's row if (incarnation, sequence) is not lower; False: it was."""
        body = to_message(inventory, pb.Inventory).SerializeToString()
        row = {
            "name": inventory.node.node,
            "incarnation": inventory.incarnation,
            "sequence": inventory.sequence,
            "reported_at_s": now_s,
            "lease_until_s": lease_until_s,
            "lost": False,
            "inventory": body,
        }
        taken = self._put(_PUT_NODE, row) == 1
        if taken:  # what was encoded here need not be decoded here
            self._cache.put_inventory(inventory.node.node, inventory)
        return taken

    def mark_lost(self, now_s: float) -> Sequence[str]:
        """Return nodes whose lease has run out since the last call; each is returned once."""
        return sorted(self._db.execute(_MARK_LOST, {"now_s": now_s}).scalars())

    def forget_nodes(self, now_s: float) -> None:
        """Delete nodes silent for ``NODE_SILENT_S_MAX``; one that returns is simply new."""
        self._db.execute(_FORGET_NODES, {"before_s": now_s - NODE_SILENT_S_MAX})

    def forget_all_nodes(self) -> None:
        """Delete all nodes and inventories; a live node reports again within a second."""
        self._db.execute(delete(t.nodes))

    # -- events --------------------------------------------------------------------------------

    def add_events(self, events: Iterable[Event], node: str, now_s: float) -> None:
        """Append events, in the transaction of the change that they tell of: both, or neither."""
        rows = [
            {
                "at_s": now_s,
                "kind": tellable(event.kind)[:64],
                "severity": tellable(event.severity)[:16],
                "message": tellable(event.message),
                "job": tellable(event.job)[:128],
                "node": node,
                "context": json.dumps(dict(event.context), sort_keys=True),
            }
            for event in events
        ]
        if rows:
            self._db.execute(_PUT_EVENT, rows)

    def events_after(self, number: int, limit: int) -> Sequence[RowMapping]:
        """Return events after ``number``, oldest first; late committers may be missed."""
        e = t.events.c
        sql = select(t.events).where(e.id > number).order_by(e.id).limit(limit)
        return self._db.execute(sql).mappings().all()

    def last_events(self, limit: int) -> Sequence[RowMapping]:
        """Return the newest events, newest first; a plain read."""
        sql = select(t.events).order_by(t.events.c.id.desc()).limit(limit)
        return self._db.execute(sql).mappings().all()

    def events_like(
        self,
        limit: int,
        *,
        before: int | None = None,
        severities: Sequence[str] = (),
        job: str = "",
        node: str = "",
        kind: str = "",
        exactly: bool = False,
    ) -> Sequence[RowMapping]:
        """Return the newest events that fit, newest first; a plain read of a bounded table.

        Args:
            limit: At most so many.
            before: Only those with a lower number.
            severities: Only of these; empty: of any.
            job: What the job's name has in it, or is ``exactly``; empty: any, and so are the next.
            node: What the node's name has in it.
            kind: What the kind has in it.
            exactly: See ``job``.
        """
        if any(map(holds_nul, (job, node, kind))):
            return ()  # no event has it, and Postgres does not take the question
        e = t.events.c
        sql = select(t.events).order_by(e.id.desc()).limit(limit)
        if before is not None:
            sql = sql.where(e.id < before)
        if severities:
            sql = sql.where(e.severity.in_(severities))
        if job and exactly:
            sql = sql.where(e.job == job)
        for column, text in ((e.job, "" if exactly else job), (e.node, node), (e.kind, kind)):
            if text:
                sql = sql.where(column.icontains(text, autoescape=True))
        return self._db.execute(sql).mappings().all()

    def forget_events(self) -> None:
        """Delete all but the newest ``EVENTS_MAX``; harmless to repeat."""
        self._db.execute(_FORGET_EVENTS)


def _readable(inventory: pb.Inventory) -> pb.Inventory:
    """Return a row's inventory without bad sources that another protocol wrote.

    No migration does it, since a process of that version may still write beside this one. Such an
    agent is refused here; as one of this version it says anew what it has found.
    """
    named = [bad for bad in inventory.bad_sources if bad.source.WhichOneof("kind")]
    if len(named) < len(inventory.bad_sources):
        del inventory.bad_sources[:]
        inventory.bad_sources.extend(named)
    return inventory

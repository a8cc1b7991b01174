"""Nodes with their inventories, the pulse, events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import RowMapping, and_, delete, func, insert, select, update

from holdfast.core.facts import Event, Inventory
from holdfast.core.text import tellable
from holdfast.rpc.codec import from_message, to_message
from holdfast.v1 import metadata_pb2 as pb
from holdfast_services.metadata import tables as t
from holdfast_services.metadata.domain.model import Node
from holdfast_services.metadata.storage.base import Statements

EVENTS_MAX = 10_000
NODE_SILENT_S_MAX = 7 * 24 * 3600.0


class NodeStatements(Statements):
    """One row per node, replaced in place."""

    # -- pulse ---------------------------------------------------------------------------------

    def pulse_s(self) -> float:
        """Return when a metadata process last said that it can write; 0 at the very first."""
        return float(self._db.execute(select(t.pulse.c.at_s)).scalar_one())

    def beat(self, before_s: float, now_s: float) -> bool:
        """Move the pulse from exactly ``before_s``; of several processes one succeeds."""
        sql = update(t.pulse).where(t.pulse.c.at_s == before_s).values(at_s=now_s)
        return self._db.execute(sql).rowcount == 1

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

    def bring_back(self, now_s: float, lease_s: float) -> None:
        """Let no time that rules compare with be later than now, nor a lease longer than one.

        A report of the future becomes an old one: whether it came before an attempt began or
        after is not known any more, and the next one is not far.
        """
        latest = [
            (t.nodes.c.lease_until_s, now_s + lease_s, now_s + lease_s),
            (t.attempts.c.lease_until_s, now_s + lease_s, now_s + lease_s),
            (t.nodes.c.reported_at_s, now_s, now_s - lease_s),
            (t.attempts.c.started_at_s, now_s, now_s),
            (t.attempt_ranks.c.registered_at_s, now_s, now_s),
            (t.runs.c.announced_at_s, now_s, now_s),
        ]
        for column, most, instead in latest:
            late = update(column.table).where(column > most)
            self._db.execute(late.values({column.name: instead}))

    # -- nodes ---------------------------------------------------------------------------------

    def nodes(self) -> Mapping[str, Node]:
        """Return every node as it last reported; decodes only what this process has not seen."""
        n = t.nodes.c
        found: dict[str, Node] = {}
        rows = self._db.execute(
            select(n.name, n.incarnation, n.sequence, n.reported_at_s, n.lease_until_s)
        ).all()
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
        sql = select(t.nodes.c.inventory).where(t.nodes.c.name == name)
        message = pb.Inventory.FromString(self._db.execute(sql).scalar_one())
        inventory = from_message(message, Inventory)
        self._cache.put_inventory(name, inventory)
        return inventory

    def node_key(self, name: str) -> tuple[int, int, float] | None:
        """Return (incarnation, sequence, lease) of a node and hold its row to the end."""
        n = t.nodes.c
        sql = select(n.incarnation, n.sequence, n.lease_until_s).where(n.name == name)
        row = self._db.execute(sql.with_for_update()).one_or_none()
        return (row[0], row[1], row[2]) if row else None

    def put_inventory(self, inventory: Inventory, now_s: float, lease_until_s: float) -> bool:
        """Replace the node's row if (incarnation, sequence) is not lower; False: it was."""
        n, name = t.nodes.c, inventory.node.node
        body = to_message(inventory, pb.Inventory).SerializeToString()
        values = {
            "incarnation": inventory.incarnation,
            "sequence": inventory.sequence,
            "reported_at_s": now_s,
            "lease_until_s": lease_until_s,
            "lost": False,
            "inventory": body,
        }
        newer = (n.incarnation < inventory.incarnation) | (
            (n.incarnation == inventory.incarnation) & (n.sequence <= inventory.sequence)
        )
        sql = self._insert(t.nodes).values(name=name, **values)
        sql = sql.on_conflict_do_update(index_elements=["name"], set_=values, where=newer)
        return self._db.execute(sql).rowcount == 1

    def mark_lost(self, now_s: float) -> Sequence[str]:
        """Return nodes whose lease has run out since the last call; each is returned once."""
        n = t.nodes.c
        sql = update(t.nodes).where(n.lease_until_s <= now_s, n.lost.is_(False)).values(lost=True)
        return sorted(self._db.execute(sql.returning(n.name)).scalars())

    def forget_nodes(self, now_s: float) -> None:
        """Delete nodes silent for ``NODE_SILENT_S_MAX``; one that returns is simply new."""
        silent = t.nodes.c.lease_until_s < now_s - NODE_SILENT_S_MAX
        old = t.nodes.c.reported_at_s < now_s - NODE_SILENT_S_MAX
        self._db.execute(delete(t.nodes).where(silent, old))

    def forget_all_nodes(self) -> None:
        """Delete every node with what it held; one that is there after all reports again."""
        self._db.execute(delete(t.nodes))

    # -- events --------------------------------------------------------------------------------

    def add_events(self, events: Iterable[Event], node: str, now_s: float) -> None:
        """Append news; in the transaction of what they tell, so neither is without the other."""
        rows = [
            {
                "at_s": now_s,
                "kind": event.kind[:64],
                "severity": event.severity[:16],
                "message": tellable(event.message),
                "job": event.job[:128],
                "node": node,
                "context": json.dumps(dict(event.context), sort_keys=True),
            }
            for event in events
        ]
        if rows:
            self._db.execute(insert(t.events), rows)

    def events_after(self, number: int, limit: int) -> Sequence[RowMapping]:
        """Return events after ``number``, oldest first; late committers may be missed."""
        e = t.events.c
        sql = select(t.events).where(e.id > number).order_by(e.id).limit(limit)
        return self._db.execute(sql).mappings().all()

    def last_events(self, limit: int) -> Sequence[RowMapping]:
        """Return the newest events, newest first; a plain read."""
        sql = select(t.events).order_by(t.events.c.id.desc()).limit(limit)
        return self._db.execute(sql).mappings().all()

    def forget_events(self) -> None:
        """Delete all but the newest ``EVENTS_MAX``; harmless to repeat."""
        newest = select(func.max(t.events.c.id)).scalar_subquery()
        self._db.execute(delete(t.events).where(t.events.c.id <= newest - EVENTS_MAX))

"""The residency machine: what a node keeps, leases, fetches and frees. Pure decisions."""

from holdfast_services.agent.domain.event_handling import handle
from holdfast_services.agent.domain.session_views import dump, inventory, pressing, session_view
from holdfast_services.agent.domain.slot_rules import admit
from holdfast_services.agent.domain.state import Content, Session, Slot, State, Work

__all__ = [
    "Content",
    "Session",
    "Slot",
    "State",
    "Work",
    "admit",
    "dump",
    "handle",
    "inventory",
    "pressing",
    "session_view",
]

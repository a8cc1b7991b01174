"""The residency machine: what a node keeps, leases, fetches and frees. Pure decisions."""

from holdfast_services.agent.domain.machine import handle
from holdfast_services.agent.domain.rules import admit
from holdfast_services.agent.domain.state import Content, Session, Slot, State, Work
from holdfast_services.agent.domain.views import dump, inventory, pressing, session_view

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

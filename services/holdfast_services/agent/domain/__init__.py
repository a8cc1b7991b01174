"""The residency machine: what a node keeps, leases, fetches and frees. Pure decisions."""

from holdfast_services.agent.domain.event_handling import handle
from holdfast_services.agent.domain.node_inventory import inventory, reports_alike
from holdfast_services.agent.domain.report_urgency import asks_to_report, pressing
from holdfast_services.agent.domain.reservation_admission import admit
from holdfast_services.agent.domain.session_views import session_view, shows_alike
from holdfast_services.agent.domain.state import Content, HeldSum, Session, Slot, State, Work
from holdfast_services.agent.domain.state_dump import dump

__all__ = [
    "Content",
    "HeldSum",
    "Session",
    "Slot",
    "State",
    "Work",
    "admit",
    "asks_to_report",
    "dump",
    "handle",
    "inventory",
    "pressing",
    "reports_alike",
    "session_view",
    "shows_alike",
]

"""Which transports this node has: RDMA where it can be used, and TCP always."""

from __future__ import annotations

import logging

from holdfast.errors import NotFoundError, UnavailableError
from holdfast_services.agent.settings import Settings
from holdfast_services.transport.preferred import Preferred, TransportState, Way
from holdfast_services.transport.rdma import transport as rdma
from holdfast_services.transport.tcp import KIND as TCP
from holdfast_services.transport.tcp import TcpTransport

log = logging.getLogger(__name__)


def data_plane(settings: Settings, budget_bytes: int) -> Preferred:
    """Return the transports of a node whose slots take up to ``budget_bytes``."""
    host = settings.listen_host
    over_tcp = TcpTransport(host, settings.data_port)
    tcp = Way(kind=TCP, transport=over_tcp, served=over_tcp.served)
    if settings.rdma_devices is None:
        return Preferred([tcp])
    try:
        places = rdma.find_places(settings.rdma_devices, budget_bytes)
        transport = rdma.RdmaTransport(places, host, settings.rdma_port)
    except NotFoundError as error:
        if not settings.rdma_devices:
            log.info("%s: data goes over TCP", error.message)
            return Preferred([tcp])
        return Preferred([tcp], TransportState(kind=rdma.KIND, problem=error.message))
    except UnavailableError as error:
        return Preferred([tcp], TransportState(kind=rdma.KIND, problem=error.message))
    where = ", ".join(map(str, places))
    over_rdma = Way(kind=rdma.KIND, transport=transport, place=where, served=transport.served)
    return Preferred([over_rdma, tcp])

"""pyverbs in our words: devices, registered memory, windows, queue pairs. Nobody else imports it.

pyverbs never releases the interpreter's lock: nothing here may wait in it. Whoever waits polls
``Queue.fd`` first. Work requests are closed by hand, since pyverbs leaks them. Sizes in bytes.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from holdfast.errors import NotFoundError, UnavailableError
from holdfast_services.transport.rdma.frames import Greeting
from holdfast_services.transport.rdma.ports import (
    READS_COUNT_MAX,
    Gid,
    LinkLayer,
    Place,
    Port,
)

try:
    try:
        import pyverbs.enums as e
    except ImportError:  # from rdma-core 59 on
        import pyverbs.libibverbs_enums as e
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import Context, get_device_list
    from pyverbs.mr import MR, MW, MWBind, MWBindInfo
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, SendWR
except ImportError as cause:
    MISSING = str(cause)
else:
    MISSING = ""

log = logging.getLogger(__name__)

DEVICES = Path("/sys/class/infiniband")
PACKET_NUMBER_BITS = 24
RETRANSMIT_TIMEOUT = 17  # 4.096 us x 2^17 = 0.54 s
RETRIES_COUNT = 6  # 7 may mean for ever
RECEIVER_TIMER = 12
HOPS_MAX = 64
BIND_S_MAX = 5.0
COMPLETIONS_PER_POLL = 16

_channels = threading.Lock()
"""Whoever makes or closes a channel holds it: its descriptor is found by comparing."""


def ports() -> list[Port]:
    """Return the ports of all devices that this process can open; the log names the others.

    Raises:
        NotFoundError: this machine has no RDMA device.
        UnavailableError: it has, and they cannot be used; says what to do.
    """
    devices = sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []
    if not devices:
        raise NotFoundError("no RDMA device")
    if MISSING:
        raise UnavailableError(
            f"RDMA devices {', '.join(devices)}, and no pyverbs ({MISSING}): install the "
            f"distribution's python3-pyverbs"
        )
    with _said("cannot list RDMA devices"):
        names = [str(device.name, "ascii") for device in get_device_list()]
    found: list[Port] = []
    reasons: list[str] = []
    for name in names:
        try:
            found += _ports_of(name)
        except UnavailableError as error:  # a container may have some devices of its host
            log.info("%s", error.message)
            reasons.append(error.message)
    if not found:
        why = "; ".join(reasons) or "none is there for this process"
        raise UnavailableError(f"RDMA devices {', '.join(devices)}: {why}")
    return found


def _ports_of(device: str) -> list[Port]:
    with _said(f"cannot open RDMA device {device}"):
        context = Context(name=device)
        about = context.query_device()
        numbers = range(1, about.phys_port_cnt + 1)
        found = [_port(context, device, number, about) for number in numbers]
        context.close()
    return found


def _port(context: Any, device: str, number: int, about: Any) -> Port:
    state = context.query_port(number)
    entries = context.query_gid_table(max(1, state.gid_tbl_len))
    return Port(
        device=device,
        number=number,
        active=state.state == e.IBV_PORT_ACTIVE,
        link_layer=state.link_layer or LinkLayer.INFINIBAND,  # unspecified: an old InfiniBand
        lid=state.lid,
        mtu=state.active_mtu,
        message_bytes_max=state.max_msg_sz,
        reads_count_max=min(READS_COUNT_MAX, about.max_qp_rd_atom, about.max_qp_init_rd_atom),
        windows=about.max_mw > 0,
        gids=tuple(
            Gid(
                index=entry.gid_index,
                address=IPv6Address(entry.gid_str()),
                roce_v2=entry.gid_type == e.IBV_GID_TYPE_ROCE_V2,
            )
            for entry in entries
            if entry.port_num == number
        ),
    )


class Region:
    """Memory that the card may write for this process, and windows may be bound to."""

    def __init__(self, domain: Any, address: int, length_bytes: int) -> None:
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_MW_BIND
        with _said("cannot register memory for RDMA"):
            self.raw = MR(domain, length_bytes, access, address=address)
        self.local_key = int(self.raw.lkey)

    def close(self) -> None:
        """Give the memory free; no window is bound to it any more."""
        with _said("cannot release memory"):
            self.raw.close()


class Window:
    """The right to read a piece of memory from afar; ``key`` once it is bound."""

    def __init__(self, domain: Any) -> None:
        with _said("cannot make a memory window"):
            self.raw = MW(domain, e.IBV_MW_TYPE_1)

    @property
    def key(self) -> int:
        """The remote key."""
        return int(self.raw.rkey)

    def close(self) -> None:
        """Take the right back; a READ that is under way fails."""
        with _said("cannot release a memory window"):
            self.raw.close()


class Card:
    """A port in use: its device's context and a protection domain."""

    def __init__(self, place: Place) -> None:
        self.place = place
        with _said(f"cannot open RDMA device {place.port.device}"):
            self.context = Context(name=place.port.device)
            self.domain = PD(self.context)

    def register(self, address: int, length_bytes: int) -> Region:
        """Register memory, which stays where it is until the region is closed."""
        return Region(self.domain, address, length_bytes)

    def window(self) -> Window:
        """Return a window that is not bound yet."""
        return Window(self.domain)

    def queue(self, depth: int) -> Queue:
        """Return a queue pair for up to ``depth`` requests at a time."""
        return Queue(self, depth)


ACCESS_REFUSED = "the other side refused access to its memory"


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of a request, by its tag; ``error`` empty: it is done."""

    tag: int
    error: str

    @property
    def refused(self) -> bool:
        """Whether the other side's card did not let this one read."""
        return self.error == ACCESS_REFUSED


class Queue:
    """One end of a reliable connection, with completions of its own; for one thread."""

    def __init__(self, card: Card, depth: int) -> None:
        self._card = card
        self._channel, self.fd = _channel(card.context)
        capacity = {"max_recv_wr": 1, "max_send_sge": 1, "max_recv_sge": 1}
        try:
            with _said("cannot make a queue pair"):
                self._completions = CQ(card.context, depth + 1, None, self._channel, 0)
                self._completions.req_notify()
                made = QPInitAttr(
                    qp_type=e.IBV_QPT_RC, scq=self._completions, rcq=self._completions,
                    cap=QPCap(max_send_wr=depth, **capacity), sq_sig_all=0,
                )  # fmt: skip
                self._pair = QP(card.domain, made)
        except UnavailableError:
            self._close_channel()
            raise
        self._packet_number = secrets.randbits(PACKET_NUMBER_BITS)

    def greeting(self) -> Greeting:
        """Return what the other side needs to connect to this one."""
        place = self._card.place
        return Greeting(
            link_layer=LinkLayer(place.port.link_layer),
            queue_number=self._pair.qp_num,
            packet_number=self._packet_number,
            gid=place.gid.address,
            lid=place.port.lid,
            mtu=place.port.mtu,
            reads_count=place.port.reads_count_max,
        )

    def connect(self, theirs: Greeting) -> None:
        """Bring this end to RTS, as the counterpart of another.

        Raises:
            UnavailableError: there is no way there from this port.
        """
        port = self._card.place.port
        want = QPAttr(port_num=port.number)
        want.qp_access_flags = e.IBV_ACCESS_REMOTE_READ
        want.path_mtu = min(port.mtu, theirs.mtu)
        want.dest_qp_num = theirs.queue_number
        want.rq_psn, want.sq_psn = theirs.packet_number, self._packet_number
        want.max_rd_atomic = min(port.reads_count_max, theirs.reads_count)
        want.max_dest_rd_atomic = port.reads_count_max
        want.min_rnr_timer = RECEIVER_TIMER
        want.timeout, want.retry_cnt, want.rnr_retry = (
            RETRANSMIT_TIMEOUT, RETRIES_COUNT, RETRIES_COUNT,
        )  # fmt: skip
        want.ah_attr = self._way(theirs)
        with _said(f"cannot connect {self._card.place} to {theirs.gid}"):
            self._pair.to_rts(want)

    def _way(self, theirs: Greeting) -> Any:
        place = self._card.place
        if theirs.link_layer == LinkLayer.INFINIBAND:
            return AHAttr(dlid=theirs.lid, is_global=0, port_num=place.port.number)
        route = GlobalRoute(
            dgid=GID(theirs.gid.exploded), sgid_index=place.gid.index, hop_limit=HOPS_MAX
        )
        return AHAttr(gr=route, is_global=1, port_num=place.port.number)

    def read(
        self, tag: int, region: Region, address: int, length_bytes: int, *, key: int, source: int
    ) -> None:
        """Ask for bytes at ``source`` of the other side, to come to ``address`` of ``region``."""
        with _said("cannot post a READ"):
            piece = SGE(address, length_bytes, region.local_key)
            request = SendWR(
                wr_id=tag, opcode=e.IBV_WR_RDMA_READ, num_sge=1, sg=[piece],
                send_flags=e.IBV_SEND_SIGNALED,
            )  # fmt: skip
            try:
                request.set_wr_rdma(key, source)
                self._pair.post_send(request)
            finally:
                request.close()
                piece.close()

    def bind(self, window: Window, region: Region, address: int, length_bytes: int) -> None:
        """Let the other side read bytes of ``region`` by the key that ``window`` has then.

        Raises:
            UnavailableError: the connection is in error.
        """
        with _said("cannot bind a memory window"):
            info = MWBindInfo(region.raw, address, length_bytes, e.IBV_ACCESS_REMOTE_READ)
            self._pair.bind_mw(window.raw, MWBind(info, send_flags=e.IBV_SEND_SIGNALED))
        until_s = time.monotonic() + BIND_S_MAX
        while not (done := self.completions()):
            if not wait_readable(self.fd, until_s - time.monotonic()):
                raise UnavailableError("a memory window was not bound in time")
            self.acknowledge()
        if done[0].error:
            raise UnavailableError(f"a memory window was not bound: {done[0].error}")

    def acknowledge(self) -> None:
        """Take the event that made ``fd`` readable; what has completed is to be looked at now."""
        with _said("cannot take an event of a completion channel"):
            self._channel.get_cq_event(self._completions)
            self._completions.ack_events(1)
            self._completions.req_notify()

    def completions(self) -> list[Completion]:
        """Return what has completed since it was looked at last."""
        found: list[Completion] = []
        with _said("cannot read completions"):
            while True:
                count, done = self._completions.poll(COMPLETIONS_PER_POLL)
                found += [Completion(one.wr_id, _error(one.status)) for one in done]
                if count < COMPLETIONS_PER_POLL:
                    return found

    def close(self) -> None:
        """End the connection: when this returns the card reads and writes no more for it."""
        with _said("cannot destroy a queue pair"):
            self._pair.close()
            self._completions.close()
        self._close_channel()

    def _close_channel(self) -> None:
        with _channels, suppress(PyverbsError):
            self._channel.close()


def wait_readable(fd: int, wait_s: float) -> bool:
    """Wait with the interpreter's lock released; False: nothing came."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0, int(wait_s * 1e3))))


def _channel(context: Any) -> tuple[Any, int]:
    """Return a new completion channel and its descriptor, which old pyverbs does not tell."""
    with _channels, _said("cannot make a completion channel"):
        before = _event_descriptors()
        channel = CompChannel(context)
        [fd] = _event_descriptors() - before
        os.set_blocking(fd, False)  # a wait in get_cq_event would hold the interpreter's lock
    return channel, fd


def _event_descriptors() -> set[int]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "infinibandevent" in str(path.readlink()):
                found.add(int(path.name))
    return found


def _error(status: int) -> str:
    """Return why a request failed, empty when it did not."""
    if status == e.IBV_WC_SUCCESS:
        return ""
    return _ERRORS.get(status, f"completion status {status}")


_ERRORS: dict[int, str] = (
    {}
    if MISSING
    else {
        int(e.IBV_WC_LOC_PROT_ERR): "local memory is not registered",
        int(e.IBV_WC_WR_FLUSH_ERR): "the queue pair is in error",
        int(e.IBV_WC_REM_ACCESS_ERR): ACCESS_REFUSED,
        int(e.IBV_WC_RETRY_EXC_ERR): "the other side does not answer",
    }
)


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Turn an error of pyverbs into ours: what could not be done, and the cure if we know one.

    So is one of the system, such as having no descriptor left.
    """
    try:
        yield
    except (PyverbsError, OSError) as cause:
        code = getattr(cause, "error_code", 0)
        cure = "; is the memlock limit too low? ulimit -l unlimited" if code == errno.ENOMEM else ""
        raise UnavailableError(f"{what}: {cause}{cure}") from cause

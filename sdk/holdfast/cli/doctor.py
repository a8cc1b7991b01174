"""``doctor``: gathers facts about this machine, then says what is wrong and what to do.

``gather`` looks; ``checks`` decides and is pure.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import holdfast
from holdfast.cli.checks import Check, check
from holdfast.cli.doctor_node import NodeFacts, look_at_node, node_checks
from holdfast.cli.doctor_store import StoreFacts, look_at_store, rebuild, store_checks
from holdfast.cli.doctor_tls import TlsFacts, look_at_tls, tls_checks
from holdfast.cli.output import Report, Table
from holdfast.cli.probes import AgentFacts, MetadataFacts, probe_agent, probe_metadata
from holdfast.core import env
from holdfast.core.byte_sizes import format_bytes
from holdfast.core.cgroup import memory_limit_bytes
from holdfast.embedded import home_folder, running_stack
from holdfast.errors import InvalidRequestError
from holdfast.rpc.protocol import PROTOCOL

PYTHON_MIN = (3, 11)
TORCH_MIN = (2, 8)
SHM_BYTES_MIN = 1 << 30
SKEW_S_MAX = 5.0
SOCKET_PATH_BYTES_MAX = 107

KNOWN_VARIABLES = frozenset(
    f"HOLDFAST_{name}"
    for name in """
ADDRESS AGENT ARENA ATTEMPT AUTO BUDGET COMMIT CONFIG DATABASE_URL DATA_PORT DECIDE_WAIT_S DOMAIN
HOME INSECURE JOB KUBERNETES LAST_STEP LAUNCH LISTEN LISTEN_HOST LOG LOG_FORMAT MESH MESHES
METRICS_LISTEN NODE NODE_LEASE_S ORPHAN_AGE_S PERSIST_PARTS PERSIST_RATE PLAN_S POLICY QUEUE
QUEUE_LEASE_S QUOTAS RANK_PROCESS RDMA RDMA_PORT READY_FILE RECORD_COMMAND REPLICATE_RATE
RESTORE_TIMEOUT REST_LISTEN REST_NAMES RPC_PORT SAID SCHEDULER SCRUB_AGE_S SCRUB_RATE STORE TLS
TOKEN TRACES TRACES_SHARE WORKER
""".split()  # noqa: SIM905 - words
)
RDMA = "rdma"
SHARE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SHM = "/dev/shm"  # noqa: S108 - only looked at
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What ``doctor`` found here. Sizes in bytes; None: there is none, or it could not be seen."""

    python: tuple[int, ...]
    torch: str | None
    services: bool
    environ: Mapping[str, str]
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    memory_limit_bytes: int | None
    kernel: str
    populates: bool
    sockets: tuple[Path, ...]
    metadata: MetadataFacts | None
    agents: tuple[AgentFacts, ...]
    store: StoreFacts | None = None
    node: NodeFacts | None = None
    tls: TlsFacts | None = None


def doctor(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Run all checks; fail if one fails. With ``rebuild``, rebuild the catalogue instead."""
    if args.rebuild:
        return rebuild(args.job, environ)
    found = list(checks(gather(environ)))
    rows = tuple((c.level, c.name, c.found, c.advice) for c in found)
    data = [{"name": c.name, "level": c.level, "found": c.found, "advice": c.advice} for c in found]
    return Report(
        data=data,
        text=[Table(("", "check", "found", "advice"), rows)],
        failed=any(c.level == "fail" for c in found),
    )


def gather(environ: Mapping[str, str]) -> Facts:
    """Look at this machine, this environment, and the services it names."""
    stack = running_stack(home_folder(environ))
    named = environ.get("HOLDFAST_AGENT")
    sockets = (Path(named),) if named else tuple(n.agent for n in stack.nodes) if stack else ()
    address = environ.get("HOLDFAST_ADDRESS") or (stack.address if stack else None)
    shm = os.statvfs(SHM) if Path(SHM).is_dir() else None
    return Facts(
        python=tuple(sys.version_info[:3]),
        torch=_version("torch"),
        services=importlib.util.find_spec("holdfast_services") is not None,
        environ={k: v for k, v in environ.items() if k.startswith("HOLDFAST_") or k == SHARE_STORE},
        shm_total_bytes=shm.f_blocks * shm.f_frsize if shm else None,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else None,
        memory_limit_bytes=memory_limit_bytes(_read),
        kernel=platform.release(),
        populates=_populates(),
        sockets=sockets,
        metadata=probe_metadata(address) if address else None,
        agents=tuple(probe_agent(socket) for socket in sockets if _fits(socket)),
        store=look_at_store(environ, stack),
        node=look_at_node(environ, sockets),
        tls=look_at_tls(environ),
    )


def checks(facts: Facts) -> Iterator[Check]:
    """Yield the checks in the order in which a user should repair their failures."""
    yield from _software(facts)
    yield from _variables(facts)
    yield from _memory(facts)
    if facts.tls is not None:
        yield from tls_checks(facts.tls)
    yield from _services(facts)
    yield from store_checks(facts.store)


def _software(facts: Facts) -> Iterator[Check]:
    yield check(
        "python",
        facts.python >= PYTHON_MIN,
        ".".join(map(str, facts.python)),
        f"use Python {'.'.join(map(str, PYTHON_MIN))} or newer",
        bad="fail",
    )
    if facts.torch is None:
        yield check("torch", False, "not installed", "pip install holdfast[torch] to train here")
    else:
        yield check(
            "torch",
            _numbers(facts.torch) >= TORCH_MIN,
            facts.torch,
            f"use torch {'.'.join(map(str, TORCH_MIN))} or newer",
        )
    found = "installed" if facts.services else "not installed"
    yield check(
        "services", facts.services, found, "pip install holdfast[services] for the embedded stack"
    )


def _variables(facts: Facts) -> Iterator[Check]:
    ours = sorted(name for name in facts.environ if name.startswith("HOLDFAST_"))
    unknown = [name for name in ours if name not in KNOWN_VARIABLES]
    yield check(
        "variables",
        not unknown,
        ", ".join(unknown or ours) or "none set",
        f"not a setting of this version: mistyped? {_nearest(unknown)}",
    )
    yield check(
        "torchrun store",
        facts.environ.get(SHARE_STORE) == "1",
        f"{SHARE_STORE} is {facts.environ.get(SHARE_STORE, 'not set')}",
        f"export {SHARE_STORE}=1 for torchrun: a restarted rank may hang without it",
    )


def _nearest(unknown: Sequence[str]) -> str:
    """Return what may have been meant by the first of these, if anything is near."""
    found = difflib.get_close_matches(unknown[0], sorted(KNOWN_VARIABLES), n=1) if unknown else []
    return f"the nearest is {found[0]}" if found else ""


def _memory(facts: Facts) -> Iterator[Check]:
    if facts.shm_total_bytes is None or facts.shm_free_bytes is None:
        yield check(SHM, False, "missing", "mount a tmpfs there; arenas go to disk now")
    else:
        budget, advice = _budget(facts)
        size = f"{format_bytes(facts.shm_free_bytes)} of {format_bytes(facts.shm_total_bytes)} free"
        yield check(SHM, facts.shm_total_bytes >= budget, size, advice)
    limit = facts.memory_limit_bytes
    shm = facts.shm_total_bytes or 0
    yield check(
        "memory limit",
        limit is None or limit >= shm,
        "none" if limit is None else format_bytes(limit),
        "the control group allows less than /dev/shm holds: set HOLDFAST_BUDGET well below it",
    )
    yield check(
        "pre-faulting",
        facts.populates,
        f"kernel {facts.kernel}",
        "MADV_POPULATE_WRITE needs Linux 5.14: the first save of each slot will be slow",
    )


def _budget(facts: Facts) -> tuple[int, str]:
    """Return the bytes that /dev/shm should have, and what to do if it has not."""
    try:
        budget = env.size(facts.environ, "HOLDFAST_BUDGET", SHM_BYTES_MIN)
    except InvalidRequestError as error:
        return sys.maxsize, error.message
    return budget, f"make it at least {format_bytes(budget)} (docker: --shm-size)"


def _services(facts: Facts) -> Iterator[Check]:
    for socket in facts.sockets:
        length = len(os.fsencode(socket))
        yield check(
            "socket path",
            _fits(socket),
            f"{length} bytes",
            f"{socket} is longer than the {SOCKET_PATH_BYTES_MAX} the kernel takes: move it",
            bad="fail",
        )
    if facts.metadata is None:
        yield check("metadata", False, "none", "run `holdfast up`, or set HOLDFAST_ADDRESS")
    else:
        yield from _metadata(facts.metadata)
    answering = [agent for agent in facts.agents if not agent.error]
    if facts.node is not None:
        yield from node_checks(facts.node, [agent.socket for agent in answering])
    yield from _right_agents(facts, answering)
    for agent in facts.agents:
        yield _agent(agent)
        if not agent.error:
            yield _arena(agent)
        if agent.transports:
            yield _rdma(agent)


def _metadata(metadata: MetadataFacts) -> Iterator[Check]:
    if metadata.error:
        advice = "is it up? see `holdfast status` and its log"
        yield check("metadata", False, metadata.error, advice, bad="fail")
        return
    low, high = metadata.protocols
    yield check(
        "metadata",
        low <= PROTOCOL <= high,
        f"{metadata.address}, version {metadata.version}, protocol {low}..{high}",
        f"this side speaks protocol {PROTOCOL}: upgrade the older side",
        bad="fail",
    )
    yield check(
        "version",
        metadata.version in ("", holdfast.__version__),
        f"{metadata.version or 'not said'} at metadata, {holdfast.__version__} here",
        "they understand one another; upgrade the older side all the same, agents last",
    )
    yield check(
        "catalogue",
        not metadata.unready,
        metadata.unready or "takes writes, as far as can be seen from here",
        "see the log of metadata, and its database: a disk that is full, a standby, a lock",
        bad="fail",
    )
    if metadata.skew_s is not None:
        yield check(
            "clock",
            abs(metadata.skew_s) <= SKEW_S_MAX,
            f"{metadata.skew_s:+.0f} s to metadata",
            "synchronize the clocks: logs and events will not line up",
        )


def _right_agents(facts: Facts, answering: Sequence[AgentFacts]) -> Iterator[Check]:
    """Say whether agents are those that this environment means, each with an arena of its own."""
    node, address = facts.environ.get("HOLDFAST_NODE"), facts.environ.get("HOLDFAST_ADDRESS")
    arenas = Counter(agent.arena for agent in answering if agent.arena)
    for agent in answering:
        advice = f"{agent.socket} is the socket of another node: set HOLDFAST_AGENT to this one's"
        if node and "HOLDFAST_AGENT" in facts.environ:  # else it is one of a stack's nodes
            yield check("node", node == agent.node, f"{agent.node} answers", advice, bad="fail")
        if address and agent.metadata_address:
            yield check(
                "catalogue of the agent",
                address == agent.metadata_address,
                agent.metadata_address,
                f"HOLDFAST_ADDRESS is {address} here: another name of it, or another catalogue",
            )
        if arenas[agent.arena] > 1:
            advice = "two agents have one arena: end one, or set its HOLDFAST_ARENA to another"
            yield check("arena lock", False, agent.arena, advice, bad="fail")


def _agent(agent: AgentFacts) -> Check:
    if agent.error:
        advice = f"is it up? its socket is {agent.socket}"
        return check("agent", False, agent.error, advice, bad="fail")
    found = (
        f"{agent.node}, {format_bytes(agent.used_bytes)} of {format_bytes(agent.budget_bytes)} used"
    )
    if agent.unchanged_bytes:
        found += f"; {format_bytes(agent.unchanged_bytes)} of copies were here already"
    if agent.replicate_bytes_per_s:
        found += f"; copies at {format_bytes(agent.replicate_bytes_per_s)}/s at most"
    advice = "it does not reach metadata: saves stay local until it does"
    return check("agent", agent.metadata_reachable, found, advice)


def _arena(agent: AgentFacts) -> Check:
    """Say whether others have filled the file system of its slots: a budget keeps none free."""
    found = (
        f"{agent.node}: {format_bytes(agent.free_bytes)} free beside its slots, which still need "
        f"{format_bytes(agent.wanted_bytes)}"
    )
    advice = (
        f"steps that find no room are not saved: remove what else fills the file system of "
        f"{agent.arena}, or enlarge it (docker: --shm-size)"
    )
    return check("arena", agent.free_bytes >= agent.wanted_bytes, found, advice)


def _rdma(agent: AgentFacts) -> Check:
    """Say whether data goes over RDMA; that there is none is no fault."""
    rdma = next((one for one in agent.transports if one.kind == RDMA), None)
    if rdma is None:
        return check("rdma", True, f"{agent.node}: not used, no device or turned off", "")
    came = ", ".join(
        f"{format_bytes(one.fetched_bytes)} over {one.kind}" for one in agent.transports
    )
    found = f"{agent.node}: {rdma.place or 'not used'}; fetched {came}"
    return check("rdma", not rdma.problem, found, f"{rdma.problem}; see docs/howto/rdma.md")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+", maxsplit=1)[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())


def _fits(socket: Path) -> bool:
    return len(os.fsencode(socket)) <= SOCKET_PATH_BYTES_MAX


def _populates() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
        return True


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None

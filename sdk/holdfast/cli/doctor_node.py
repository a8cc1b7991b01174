"""What ``doctor`` checks of this node's own settings: sockets, ports, who has the arena, the file.

``look_at_node`` looks, ``node_checks`` decides and is pure.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli.checks import Check, check
from holdfast.cli.config import told
from holdfast.errors import CheckpointError

PORTS = ("LISTEN", "REST_LISTEN", "METRICS_LISTEN", "RPC_PORT", "DATA_PORT", "RDMA_PORT")
"""Variables that name a port of this machine, without their prefix."""
LISTENS = "0A"
COMMAND_CHARACTERS_MAX = 60
OURS = "holdfast"


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a variable names; ``holder`` is the process that listens there, empty: none."""

    variable: str
    number: int
    holder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What was seen. ``sockets`` by path: why no agent can be behind it; empty: one can.

    ``arena_holder`` is the process that has locked ``arena``; empty: none has. ``refusals`` are
    what services would say of the file that ``settings_file`` names.
    """

    sockets: Mapping[Path, str]
    ports: tuple[Port, ...] = ()
    arena: str = ""
    arena_holder: str = ""
    settings_file: str = ""
    refusals: tuple[str, ...] = ()


def look_at_node(environ: Mapping[str, str], sockets: Sequence[Path]) -> NodeFacts:
    """Return what this machine shows of what ``environ`` names."""
    arena, file = environ.get("HOLDFAST_ARENA", ""), environ.get("HOLDFAST_CONFIG", "")
    return NodeFacts(
        sockets={path: socket_trouble(path) for path in sockets},
        ports=tuple(_ports(environ)),
        arena=arena,
        arena_holder=arena_holder(Path(arena)) if arena else "",
        settings_file=file,
        refusals=_refusals(environ) if file else (),
    )


def node_checks(facts: NodeFacts, answered: Sequence[Path]) -> Iterator[Check]:
    """Yield one check per fact that matters; ``answered`` are sockets with an agent."""
    for path, trouble in facts.sockets.items():
        others = ", ".join(str(each) for each in answered if each != path)
        hint = f"; agents answer at {others}" if others else ""
        advice = f"HOLDFAST_AGENT is to be the path that the agent of this node has{hint}"
        yield check("socket", not trouble, trouble or str(path), advice, bad="fail")
    yield from _port_checks(facts.ports)
    if facts.arena and not answered:
        yield check(
            "arena lock",
            not facts.arena_holder,
            f"{facts.arena} is of {facts.arena_holder or 'nobody'}",
            "another agent has this arena, and one has room there: end it, ask it at its own "
            "socket, or set HOLDFAST_ARENA to a folder of its own",
            bad="fail",
        )
    if facts.settings_file:
        yield check(
            "settings file",
            not facts.refusals,
            "; ".join(facts.refusals) or facts.settings_file,
            "services refuse to start with it: correct it, then see `holdfast config`",
            bad="fail",
        )


def _port_checks(ports: Sequence[Port]) -> Iterator[Check]:
    """Say of each port who else has it; that one of our own processes does is as it should be."""
    counts = Counter(port.number for port in ports)
    for port in ports:
        twice = [each.variable for each in ports if each.number == port.number]
        foreign = port.holder and OURS not in port.holder
        found = f"{port.variable}: {port.number}, {port.holder or 'free'}"
        advice = (
            f"{' and '.join(twice)} name one port: set another"
            if counts[port.number] > 1
            else f"it is taken: end that process, or set {port.variable} to another port"
        )
        yield check("port", not foreign and counts[port.number] == 1, found, advice)


def socket_trouble(path: Path) -> str:
    """Return why no agent of ours can be behind a path; empty: one can."""
    try:
        seen = path.stat()
    except FileNotFoundError:
        return f"{path} is not there"
    except OSError as error:
        return f"{path} cannot be seen: {error.strerror}"
    if not stat.S_ISSOCK(seen.st_mode):
        return f"{path} is no socket"
    if not os.access(path, os.W_OK):
        return f"{path} belongs to user {seen.st_uid}, and this is user {os.getuid()}"
    return ""


def _ports(environ: Mapping[str, str]) -> Iterator[Port]:
    for name in PORTS:
        text = environ.get(f"HOLDFAST_{name}", "").rpartition(":")[2]
        if text.isascii() and text.isdigit() and 0 < int(text[:6]) < 1 << 16:
            yield Port(f"HOLDFAST_{name}", int(text), port_holder(int(text)))


def port_holder(port: int) -> str:
    """Return who listens on a TCP port of this machine; empty: nobody."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _lines(table)[1:]:
            fields = line.split()
            if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return _process_with(inodes) or "a process of another user" if inodes else ""


def _process_with(links: set[str]) -> str:
    """Return the process that has one of these open, as far as this user can see."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            opened = list(folder.iterdir())
        except OSError:
            continue  # of another user, or gone meanwhile
        if any(_link(each) in links for each in opened):
            return process(int(folder.parent.name))
    return ""


def _link(descriptor: Path) -> str:
    """Return what is open; empty: it was closed meanwhile, as that of the listing itself."""
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""


def arena_holder(folder: Path) -> str:
    """Return the process that has locked an arena; empty: none, or there is no such folder."""
    try:
        seen = folder.stat()
    except OSError:
        return ""
    place = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}:{seen.st_ino}"
    for line in _lines("/proc/locks"):
        fields = line.split()  # number: FLOCK ADVISORY WRITE pid device:inode begin end
        if fields[1] == "FLOCK" and fields[5] == place:
            return process(int(fields[4]))
    return ""


def process(pid: int) -> str:
    """Return a process for people: number and command, without the folder of its program."""
    try:
        program, *rest = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (OSError, ValueError):
        program, rest = "", []
    command = " ".join((program.rpartition("/")[2], *rest)).strip()
    return f"pid {pid} ({command[:COMMAND_CHARACTERS_MAX] or 'not visible'})"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _refusals(environ: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return tuple(told("", environ)["problems"])
    except CheckpointError as error:
        return (error.message,)

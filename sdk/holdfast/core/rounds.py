"""What launchers say, and what they are told: rounds of a launch, places in them, failures.

A report and a view are levels: whole, replaced by the next, so that a repeat or a loss is harmless.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from holdfast.core.ids import job_name, session_id
from holdfast.core.text import holds_nul
from holdfast.errors import InvalidRequestError

NODES_MAX = 65_536
RANKS_PER_NODE_MAX = 4096
RESTARTS_MAX = 10_000
SHRINK_S_MAX = 7 * 86_400.0
TEXT_LENGTH_MAX = 8192
PORT_MAX = 65_535
NOTICE_S_MAX = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all launchers of a launch must agree on.

    ``command`` is the digest of what they run, hex. ``restarts_max`` counts within any hour. A
    round begins with ``nodes_max`` nodes, or after ``shrink_after_s`` with at least ``nodes_min``.
    ``allocated``: no round begins before an allocation says who takes part.
    """

    command: str = ""
    nodes_min: int = 1
    nodes_max: int = 1
    shrink_after_s: float = 30.0
    restarts_max: int = 20
    allocated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How the first rank of a node that did not end well ended.

    ``code``: of the exit, minus the number of a signal. ``step`` is the last that it had completed,
    -1: not known. ``reason`` is one line, ``detail`` its traceback. ``outside``: nothing that the
    script did, so another try may go well. ``of_peer``: it speaks of another rank that has gone.
    """

    rank: int
    code: int
    reason: str = ""
    detail: str = ""
    step: int = -1
    outside: bool = False
    of_peer: bool = False

    @property
    def exit_code(self) -> int:
        """The code that a shell would show for it, from 1 to 255."""
        return 128 - self.code if self.code < 0 else min(max(self.code, 1), 255)

    def repeats(self, other: RankFailure | None) -> bool:
        """Tell whether it is the same as ``other``, and of the script's own making."""
        if other is None or self.outside or self.of_peer:
            return False
        return (self.reason, self.step) == (other.reason, other.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReport:
    """All that a launcher says of itself; of two, the one with the higher ``sequence`` counts.

    ``ranks`` processes may run on its node. ``port`` is free there, for the next round; another
    one each time. ``round``: nonce of the round whose ranks it runs or ran, empty: none.
    ``finished``: all of these have ended well; ``failure``: one has not. ``stopping``: it was told
    to end; ``left``: it has ended all ranks, and ends. ``address``: host at which other nodes reach
    its ranks, empty: the same as its agent's. ``warm``: they would begin at once, as its standbys
    have imported what they are to. ``goes_in_s``: its node will be taken away so long after this
    report, 0 to ``NOTICE_S_MAX``; 0: nobody has said so.
    """

    launcher: str
    sequence: int
    job: str
    holder: str = ""
    terms: Terms = field(default_factory=Terms)
    ranks: int = 1
    port: int = 0
    round: str = ""
    finished: bool = False
    failure: RankFailure | None = None
    stopping: bool = False
    left: bool = False
    address: str = ""
    warm: bool = False
    goes_in_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one launcher stands in a round: its ranks are ``first_rank`` and those after it.

    ``ranks``: it runs so many of them, 0: as many as it said; ``devices``: on these GPUs, by their
    numbers among those that it sees; empty: on all.
    """

    round: int
    nonce: str
    master_address: str
    master_port: int
    first_rank: int
    world_size: int
    node_rank: int
    nodes_count: int
    ranks: int = 0
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a launch ended: the code that each launcher exits with, and why, for people.

    ``outside``: nothing that the script did. ``released``: it goes on without this launcher.
    """

    code: int
    reason: str = ""
    outside: bool = False
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchView:
    """All that a launcher should know.

    Ranks of another round than ``place`` names are to be killed. ``launch`` names the launch
    through all its rounds. ``waiting`` says for people what is waited for. ``stop``: the ranks are
    to save and end. ``port_taken``: the port of its node that the last round was given;
    offer another. ``poll_s``: ask again so often, or count as lost. ``goes``: its notice was heard:
    the round ends after a step that is saved, and the next begins without this launcher.
    """

    version: str = ""
    launch: str = ""
    place: Place | None = None
    waiting: str = ""
    stop: bool = False
    ending: Ending | None = None
    port_taken: int = 0
    poll_s: float = 1.0
    goes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A launcher's report, and how long it waits for another view than that of ``version``.

    Its agent adds ``node`` and the ``address`` of the host. ``gone``: it saw the launcher end.
    """

    report: LauncherReport
    version: str = ""
    wait_s: float = 0.0
    node: str = ""
    address: str = ""
    gone: bool = False


def check(report: LauncherReport) -> None:
    """Refuse a report whose names or numbers make no sense.

    Raises:
        InvalidRequestError: names the number.
    """
    session_id(report.launcher)
    job_name(report.job)
    terms = report.terms
    numbers = {
        "ranks of a node": (report.ranks, 1, RANKS_PER_NODE_MAX),
        "port": (report.port, 1, PORT_MAX),
        "least nodes": (terms.nodes_min, 1, NODES_MAX),
        "most nodes": (terms.nodes_max, terms.nodes_min, NODES_MAX),
        "restarts per hour": (terms.restarts_max, 0, RESTARTS_MAX),
    }
    for what, (number, low, high) in numbers.items():
        if not low <= number <= high:
            raise InvalidRequestError(f"{what}: {number} is not within {low}..{high}")
    if not (math.isfinite(terms.shrink_after_s) and 0 <= terms.shrink_after_s <= SHRINK_S_MAX):
        raise InvalidRequestError(f"shrink after {terms.shrink_after_s} s is not within a week")
    if not 0 <= report.goes_in_s <= NOTICE_S_MAX:  # NaN, too
        raise InvalidRequestError(f"a notice of {report.goes_in_s} s is not within an hour")
    failure = report.failure
    texts = [report.holder, report.round, report.address, terms.command]
    texts += [failure.reason, failure.detail] if failure else []
    if any(len(text) > TEXT_LENGTH_MAX or holds_nul(text) for text in texts):
        raise InvalidRequestError(f"launcher {report.launcher}: a text is too long or has a NUL")

"""Of the ways to a peer the first that works; what was left is said once it is known to work."""

from __future__ import annotations

import pytest

from holdfast.core.inventory import Endpoint
from holdfast.errors import (
    CheckpointError,
    DigestMismatchError,
    NotFoundError,
    StoppedError,
    UnavailableError,
)
from holdfast.format.digest import PART_BYTES
from holdfast_services.transport import Fetch, FetchRequest
from holdfast_services.transport.preferred import Preferred, TransportState, Way

FAST, SLOW = (Endpoint(kind=kind, address="a:1") for kind in ("fast", "slow"))
REQUEST = FetchRequest(key="k", incarnation=1, length_bytes=PART_BYTES + 5, digests=(b"0", b"1"))


class Fake:
    """A transport that gives some parts, and then fails or not."""

    def __init__(self, kind: str, *, parts=(0, 1), error: CheckpointError | None = None) -> None:
        self.kind, self.parts, self.error = kind, parts, error
        self.asked: list[tuple[Endpoint, ...]] = []
        self.revoked: list[memoryview] = []
        self.closed = False

    def serve(self, source):
        return (Endpoint(kind=self.kind, address=f"{source}:1"),)

    def fetch(self, endpoints, fetch):
        self.asked.append(tuple(endpoints))
        fetch.done.update(self.parts)
        if self.error is not None:
            raise self.error

    def revoke(self, view):
        self.revoked.append(view)

    def close(self):
        self.closed = True


def preferred(*fakes, unused=None):
    made = Preferred([Way(kind=f.kind, transport=f, place=f"at {f.kind}") for f in fakes], unused)
    said: list[str] = []
    made.on_fallback = said.append
    return made, said


def fetch(made, endpoints=(SLOW, FAST), done=None):
    wanted = Fetch(REQUEST, memoryview(b""), done=set() if done is None else done)
    made.fetch(endpoints, wanted)


def test_the_first_kind_that_both_have_is_used():
    fast, slow = Fake("fast"), Fake("slow")
    made, said = preferred(fast, slow)
    fetch(made)
    fetch(made, (SLOW,))

    assert [(FAST,)] == fast.asked
    assert [(SLOW,)] == slow.asked
    assert [] == said


def test_a_way_that_fails_is_left_with_its_reason_and_its_parts_stay():
    fast = Fake("fast", parts=(1,), error=UnavailableError("no cable"))
    slow = Fake("slow", parts=(0,))
    made, said = preferred(fast, slow)
    done: set[int] = set()
    fetch(made, done=done)

    assert {0, 1} == done
    assert ["fast://a:1 is left for slow for 60 s: no cable"] == said
    assert made.states() == (
        TransportState(kind="fast", place="at fast", fetched_bytes=5, problem=said[0]),
        TransportState(kind="slow", place="at slow", fetched_bytes=PART_BYTES),
    )


def test_of_several_places_of_a_kind_the_first_alone_is_asked():
    """A peer may name a thousand, and each takes as long as a connection may."""
    fast, slow = Fake("fast", error=UnavailableError("no cable")), Fake("slow")
    made, _ = preferred(fast, slow)
    others = tuple(Endpoint(kind="fast", address=f"a:{port}") for port in range(2, 9))
    fetch(made, (FAST, *others, SLOW))

    assert [(FAST,)] == fast.asked
    assert [(SLOW,)] == slow.asked


def test_a_way_that_was_left_rests_for_that_peer_alone():
    fast, slow = Fake("fast", error=UnavailableError("no cable")), Fake("slow")
    made, said = preferred(fast, slow)
    fetch(made)
    fetch(made)
    other = Endpoint(kind="fast", address="b:1")
    fetch(made, (other, SLOW))

    assert [(FAST,), (other,)] == fast.asked
    assert 2 == len(said)


def test_a_way_that_rests_is_tried_where_there_is_no_other():
    fast, slow = Fake("fast", error=UnavailableError("no cable")), Fake("slow")
    made, _ = preferred(fast, slow)
    fetch(made)
    with pytest.raises(UnavailableError, match="no cable"):
        fetch(made, (FAST,))


def test_a_peer_that_is_away_altogether_is_no_fallback():
    fast = Fake("fast", error=UnavailableError("away"))
    slow = Fake("slow", error=UnavailableError("away, too"))
    made, said = preferred(fast, slow)
    with pytest.raises(UnavailableError, match="away, too"):
        fetch(made)
    fetch_again = pytest.raises(UnavailableError)
    with fetch_again:
        fetch(made)

    assert [] == said
    assert 2 == len(fast.asked)


@pytest.mark.parametrize("error", [NotFoundError, DigestMismatchError, StoppedError])
def test_what_is_the_sources_fault_leads_to_no_other_way(error):
    fast, slow = Fake("fast", error=error("so it is")), Fake("slow")
    made, said = preferred(fast, slow)
    with pytest.raises(error):
        fetch(made)

    assert [] == slow.asked
    assert [] == said


def test_a_peer_of_no_known_kind_is_told_the_kinds_of_both():
    made, _ = preferred(Fake("fast"), Fake("slow"))
    with pytest.raises(UnavailableError, match="serves over later; this side fetches over fast, s"):
        fetch(made, (Endpoint(kind="later", address="?"),))


def test_all_ways_serve_are_revoked_and_closed():
    fast, slow = Fake("fast"), Fake("slow")
    made, _ = preferred(fast, slow)
    view = memoryview(b"x")

    assert ["fast", "slow"] == [endpoint.kind for endpoint in made.serve("s")]
    made.revoke(view)
    made.close()
    assert [view] == fast.revoked == slow.revoked
    assert fast.closed
    assert slow.closed


def test_a_kind_that_is_not_there_says_why():
    unused = TransportState(kind="fast", problem="memlock")
    made, _ = preferred(Fake("slow"), unused=unused)

    assert ("fast", "slow") == tuple(state.kind for state in made.states())
    assert "memlock" == made.states()[0].problem

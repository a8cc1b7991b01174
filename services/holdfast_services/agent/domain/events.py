"""What happens to an agent (events) and what it decides to do (actions). Data only."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core import session, user_events
from holdfast.core.budget import Reservation
from holdfast.core.ids import ShardId
from holdfast.core.inventory import Peer
from holdfast.core.node_view import NodeView
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName
from holdfast.core.sources import Source
from holdfast.core.stripes import Element
from holdfast.errors import UnavailableError
from holdfast_services.agent.domain.state import Content, Giver, HeldSum, Rebuilding, Session

# ------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes."""

    now_s: float


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A rank opened its session, or did so again after our restart."""

    session: Session


@dataclass(frozen=True, slots=True)
class Reserved:
    """A reservation that ``admit`` let through."""

    session: str
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class Updated:
    """A rank sent an update."""

    update: session.SessionUpdate


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The rank's process closed its session or died."""

    session: str


@dataclass(frozen=True, slots=True)
class ViewArrived:
    """Metadata answered a report with this node's view."""

    view: NodeView


@dataclass(frozen=True, slots=True)
class MetadataLost:
    """Metadata does not answer; ``reason`` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class SlotCreated:
    """A file was made and pre-faulted."""

    slot: str


@dataclass(frozen=True, slots=True)
class SlotRefused:
    """A file could not be made."""

    slot: str
    reason: str


@dataclass(frozen=True, slots=True)
class SlotClosed:
    """The arena's folder shows ``.closed`` for this name."""

    name: SlotName


@dataclass(frozen=True, slots=True)
class SlotSealed:
    """A closed slot was hashed, its sidecar was written, and it was renamed to sealed."""

    name: SlotName
    content: Content


@dataclass(frozen=True, slots=True)
class SealFailed:
    """A closed slot does not hold a segment of the rank that leased it.

    Empty ``reason``: it was filled for a copy, and the agent that lent it is gone.
    """

    name: SlotName
    reason: str


@dataclass(frozen=True, slots=True)
class SealBlocked:
    """A slot cannot be sealed yet and is tried again: its writer has the lock, or ``reason``."""

    name: SlotName
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SlotVerified:
    """A sealed slot was hashed again, for a decision or because a peer suspects it."""

    name: SlotName
    intact: bool
    decision: int


@dataclass(frozen=True, slots=True)
class Suspected:
    """A peer says that what this slot served did not match."""

    name: SlotName


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """A slot was taken back: free again, or its file is gone because a writer holds it."""

    name: SlotName
    replaced: bool


@dataclass(frozen=True, slots=True)
class WorkBlocked:
    """An action could not be done now, since a writer holds the slot, say. It is tried again."""

    name: SlotName


@dataclass(frozen=True, slots=True)
class HoldAsked:
    """An owner asks this node to hold a copy."""

    shard: Shard
    source: Peer


@dataclass(frozen=True, slots=True)
class FetchDone:
    """A copy arrived, every part verified, sealed.

    ``alike_bytes`` of it are what a rank here had filled in; None: none was to.
    """

    name: SlotName
    content: Content
    bad: tuple[Source, ...] = ()
    alike_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """No source gave the copy; ``bad`` are sources whose bytes do not match.

    ``advice`` says what to do about an object store that could not be read; empty if it could.
    """

    name: SlotName
    shard: ShardId
    reason: str
    bad: tuple[Source, ...] = ()
    advice: str = ""


@dataclass(frozen=True, slots=True)
class HoldAnswered:
    """A backup answered; ``refused`` is the error's kind, empty when it holds the copy.

    ``coming``: it does not hold it yet, and is fetching.
    """

    shard: ShardId
    peer: Peer
    refused: str = ""
    message: str = ""
    coming: bool = False


@dataclass(frozen=True, slots=True)
class ElementMade:
    """An element was made of verified parts, and sealed."""

    name: SlotName
    held: HeldSum


@dataclass(frozen=True, slots=True)
class ElementFailed:
    """An element could not be made: a member is not to be had, or not good."""

    name: SlotName
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class ElementSuspected:
    """A peer says that what this slot served of an element did not match."""

    name: SlotName


@dataclass(frozen=True, slots=True)
class ElementVerified:
    """An element was hashed again."""

    name: SlotName
    intact: bool


AgentEvent = (
    Tick | SessionOpened | Reserved | Updated | SessionEnded | ViewArrived | MetadataLost
    | SlotCreated | SlotRefused | SlotClosed | SlotSealed | SealFailed | SealBlocked
    | SlotVerified | Suspected | Reclaimed | WorkBlocked | HoldAsked | FetchDone | FetchFailed
    | HoldAnswered | ElementMade | ElementFailed | ElementSuspected | ElementVerified
)  # fmt: skip

# ----------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class CreateSlot:
    """Make and pre-fault a file, near ``session``'s rank; answers SlotCreated or SlotRefused."""

    name: SlotName
    length_bytes: int
    session: str = ""


@dataclass(frozen=True, slots=True)
class DropSlot:
    """Unlink a file."""

    name: SlotName


@dataclass(frozen=True, slots=True)
class RenameSlot:
    """Move a slot to another state, at once."""

    old: SlotName
    new: SlotName


@dataclass(frozen=True, slots=True)
class SealSlot:
    """Hash a closed slot and seal it; ``expected`` is (run, generation, rank) of its holder."""

    name: SlotName
    expected: tuple[str, int, int] | None


@dataclass(frozen=True, slots=True)
class VerifySlot:
    """Hash a sealed slot again and compare with ``digests``."""

    name: SlotName
    content: Content
    decision: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Serve this slot no more and say so in its sidecar."""

    name: SlotName
    content: Content


@dataclass(frozen=True, slots=True)
class ReclaimSlot:
    """Take a slot back under its lock; ``replace``: unlink it if the lock is held."""

    name: SlotName
    replace: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fill an open slot from the first source, in their order, that is good.

    ``owner`` is whose copy it becomes; empty: that of the source. ``asked``: the owner asked for
    it. With ``parts`` the slot is a partial one that has yet to be made, and they are all that is
    fetched. ``last`` is what the slot held before: what of it is the same need not come.
    ``filled``: a rank of this node has put in what it has alike, and that need not come either.
    """

    name: SlotName
    shard: Shard
    sources: tuple[Giver, ...]
    owner: str
    asked: bool = False
    parts: frozenset[int] = frozenset()
    last: Content | None = None
    filled: bool = False


@dataclass(frozen=True, slots=True)
class PaceFetches:
    """Have all fetches, those under way too, keep the rate for copies, or go without it."""

    limited: bool


@dataclass(frozen=True, slots=True)
class AskHold:
    """Ask a backup to hold a copy of our shard."""

    shard: Shard
    peer: Peer


@dataclass(frozen=True, slots=True)
class MakeElement:
    """Fill an open slot with the sum of all members and seal it as that element."""

    name: SlotName
    element: Element
    members: Rebuilding


@dataclass(frozen=True, slots=True)
class VerifyElement:
    """Hash an element again and compare with its digests."""

    name: SlotName
    held: HeldSum


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell people."""

    event: user_events.Event


Action = (
    CreateSlot | DropSlot | RenameSlot | SealSlot | VerifySlot | ReclaimSlot | Fetch | AskHold
    | Quarantine | MakeElement | VerifyElement | PaceFetches | Emit
)  # fmt: skip


def gave_up(action: Action, reason: str) -> list[AgentEvent]:
    """Return the events that tell the machine of an action that failed with an unexpected error."""
    event: AgentEvent
    match action:
        case CreateSlot():
            event = SlotRefused(action.name.slot, reason)
        case SealSlot():
            event = SealBlocked(action.name, reason)
        case VerifySlot() | VerifyElement() | ReclaimSlot():
            event = WorkBlocked(action.name)
        case Fetch():
            event = FetchFailed(action.name, action.shard.id, reason)
        case MakeElement():
            event = ElementFailed(action.name, action.element.key, reason)
        case AskHold():
            event = HoldAnswered(action.shard.id, action.peer, UnavailableError.kind, reason)
        case _:
            return []
    return [event]

"""Names the tensor of which ranks do not save all, once the catalogue has seen that they do not.

The catalogue has a number of each rank, which tells that boxes do not add up and not which; it
gives such a step up before it commits, and then its slots are free. So rank 0 looks at the next
ones: it asks for the heads of their segments while they are saved, until it has seen one of each
rank. Nothing is asked for while all is well, and training does not wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import replace

from holdfast.core.ids import CheckpointId, Generation, Step, run_id
from holdfast.core.needs import HEADS_COUNT_MAX, Head
from holdfast.core.session import SessionView
from holdfast.core.shard import Shard, is_of_plans, unlike_ranks
from holdfast.core.user_events import Event
from holdfast.errors import CheckpointError
from holdfast.format.header import parse_header
from holdfast.format.plan_faults import first_fault
from holdfast.format.segment import SegmentHeader

LOOK_S = 0.02
LOOKS_COUNT_MAX = 500
"""How often it is asked for the heads of one step at most, and how long it waits between."""

log = logging.getLogger(__name__)


class PlanDoubts:
    """What rank 0 does after a step was given up since ranks do not save all of the state.

    It looks at one step at a time, tells what is wrong once, and leaves more than
    ``HEADS_COUNT_MAX`` ranks alone. Once ranks add up again, only a later step that was given up
    makes it look again.

    Args:
        job: The job's name.
        world_size: How many ranks save.
        heads: Asks for the heads of segments.
        tell: Passes an event on.
        start: Runs a function on a thread of its own.
    """

    def __init__(
        self,
        job: str,
        world_size: int,
        heads: Callable[[CheckpointId, Collection[int]], Collection[Head]],
        tell: Callable[[Event], None],
        start: Callable[[Callable[[], None]], None],
    ) -> None:
        self._job = job
        self._world_size = world_size
        self._heads = heads
        self._tell = tell
        self._start = start
        self._doubted = 0
        self._cleared = 0
        self._busy = world_size > HEADS_COUNT_MAX
        self._newest = 0
        self._plan = ""
        self._seen: dict[int, SegmentHeader] = {}
        self._pause = threading.Event()

    def hear(self, view: SessionView) -> None:
        """Take that a step of the view was given up for what the ranks save, if one was."""
        steps = (one.step for one in view.steps if one.abandoned and is_of_plans(one.reason))
        self._doubted = max((self._doubted, *steps))

    def begun(self, step: int, run: str, generation: int) -> None:
        """Look at ``step``, which is being saved from now on, if there is a reason to."""
        self._newest = step
        if self._doubted > self._cleared and not self._busy:
            self._busy = True
            checkpoint = CheckpointId(run_id(run), Step(step), Generation(generation))
            self._start(lambda: self._look(checkpoint))

    def _look(self, checkpoint: CheckpointId) -> None:
        self._seen.pop(0, None)  # asked for anew: it tells whether the others are of this plan
        try:
            for _ in range(LOOKS_COUNT_MAX):
                left = set(range(self._world_size)) - self._seen.keys()
                for head in self._heads(checkpoint, left):
                    self._take(parse_header(head.data, head.length_bytes))
                if len(self._seen) == self._world_size:
                    self._judge(checkpoint.step)
                    return
                if self._newest != checkpoint.step:
                    break
                self._pause.wait(LOOK_S)
        except CheckpointError as error:
            log.info("the segments of step %d are not seen: %s", checkpoint.step, error)
        self._busy = False

    def _take(self, header: SegmentHeader) -> None:
        """Take a header in; one of another plan of rank 0's leaves none of those before.

        Ranks make their plans anew together, and old boxes say nothing about new ones.
        """
        rank, plan = header.identity.id.rank, header.identity.plan_hash
        if rank == 0:
            if self._plan not in ("", plan):
                self._seen = {}
            self._plan = plan
        self._seen[rank] = header

    def _judge(self, step: int) -> None:
        """Tell what is wrong; it stays busy then, since every step has the same to say.

        So it does if nobody at all has the tensor that some do not know of.
        """
        seen, self._seen = list(self._seen.values()), {}
        fault = first_fault(seen)
        if not fault:
            if not unlike_ranks(map(_shard, seen)):
                self._cleared = step
                self._busy = False
            return
        message = f"no step can commit: {fault}"
        told = Event(kind="plan_refused", severity="error", message=message, job=self._job)
        self._tell(replace(told, context={"step": str(step)}))
        log.error("job %s: %s", self._job, message)


def _shard(header: SegmentHeader) -> Shard:
    """Return what the catalogue sees of a segment; of its bytes nothing is known."""
    identity = header.identity
    return Shard(
        id=identity.id,
        job=identity.job,
        world_size=identity.world_size,
        plan_hash=identity.plan_hash,
        length_bytes=0,
        root_digest=b"",
    )

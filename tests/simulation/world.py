"""Time, chance and messages: one heap of events, one generator, one seed.

``World`` knows no protocol. What happens is a function that was asked for with ``later``, at a
party: a node's agent, a rank, a service. Of two at one moment the one that was asked for first
comes first, so a seed tells one history. A frozen party does what came meanwhile once it thaws.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.checks import Broken

ANSWER_S_MAX = 3.0
SLOW_S_MAX = 4.0
EVENTS_MAX = 100_000
STORY_LINES_MAX = 5_000

Do = Callable[[], None]
Reply = Callable[[Do], None]


@dataclass(kw_only=True)
class Net:
    """How messages fare; each chance is of one message."""

    lost: float = 0.0
    doubled: float = 0.0
    answer_lost: float = 0.0
    slow: float = 0.0
    cut: list[tuple[str, str]] = field(default_factory=list)
    """Pairs (from, to) that nothing passes, one-way; one may be there twice."""


class World:
    """The heap, the clock, the generator and the story so far."""

    def __init__(self, seed: int, net: Net) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.net = net
        self.story: list[str] = []
        self.events_count = 0
        self._heap: list[tuple[float, int, str, Do]] = []
        self._numbers = itertools.count()
        self._frozen: dict[str, list[Do]] = {}

    # -- time ----------------------------------------------------------------------------------

    def later(self, delay_s: float, do: Do, at: str = "") -> None:
        """Have ``do`` happen in ``delay_s`` at the party ``at``; empty: nobody can stop it."""
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._numbers), at, do))

    def soon(self, most_s: float, do: Do, at: str = "") -> None:
        """Have ``do`` happen within ``most_s``, nobody knows when."""
        self.later(self.rng.uniform(0.0, most_s), do, at)

    def step(self) -> None:
        """Let the next thing happen."""
        if not self._heap or self.events_count > EVENTS_MAX:
            raise Broken("SIM: nothing will happen any more, or too much has")
        self.now_s, _, party, do = heapq.heappop(self._heap)
        if party in self._frozen:
            self._frozen[party].append(do)
            return
        self.events_count += 1
        do()

    def freeze(self, party: str) -> None:
        """Stop a party as SIGSTOP does; what comes for it waits."""
        self._frozen.setdefault(party, [])

    def thaw(self, party: str) -> None:
        """Let a party go on with all that has come meanwhile, in order."""
        for do in self._frozen.pop(party, []):
            self.later(0.0, do, party)

    def frozen(self, party: str) -> bool:
        """Tell whether a party is frozen."""
        return party in self._frozen

    def say(self, text: str) -> None:
        """Tell the reader of the story."""
        if len(self.story) < STORY_LINES_MAX:
            self.story.append(f"{self.now_s:9.3f}  {text}")

    # -- messages ------------------------------------------------------------------------------

    def call(self, source: str, target: str, do: Callable[[], Do | None], failed: Do) -> None:
        """Send a request; its effect happens at ``target``, and what that returns at ``source``.

        ``do`` returns the answer as what it does to the asker, None: nobody is there.
        """

        def answering(reply: Reply) -> None:
            answer = do()
            if answer is not None:
                reply(answer)

        self.request(source, target, answering, failed)

    def request(self, source: str, target: str, do: Callable[[Reply], None], failed: Do) -> None:
        """Send a request as ``call`` does, to who replies when it can, or never.

        Of answer and failure the asker sees one, once; the effect may happen without either, or
        twice.
        """
        seen = False

        def once(then: Do) -> None:
            nonlocal seen
            if not seen:
                seen = True
                then()

        def reply(answer: Do) -> None:
            if not self._happens(self.net.answer_lost) and (target, source) not in self.net.cut:
                self.later(self._delay_s(), lambda: once(answer), source)

        def arrive() -> None:
            if (source, target) not in self.net.cut:
                do(reply)

        self.later(ANSWER_S_MAX, lambda: once(failed), source)
        if not self._happens(self.net.lost):
            self.later(self._delay_s(), arrive, target)
        if self._happens(self.net.doubled):
            self.later(self._delay_s() + self.rng.uniform(0.0, SLOW_S_MAX), arrive, target)

    def passes(self, source: str, target: str) -> bool:
        """Tell whether a message gets there: for calls that are one event with their answer."""
        return not self._happens(self.net.lost) and (source, target) not in self.net.cut

    def _happens(self, chance: float) -> bool:
        return chance > 0.0 and self.rng.random() < chance

    def _delay_s(self) -> float:
        if self._happens(self.net.slow):
            return self.rng.uniform(0.0, SLOW_S_MAX)
        return self.rng.uniform(0.0002, 0.003)

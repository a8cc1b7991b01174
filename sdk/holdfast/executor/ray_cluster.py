"""`holdfast execute --ray`: nodes of a Ray cluster become executors, all or none of them.

What lives on without this process is Ray's: the placement group that reserves the nodes, and an
actor on each that has an executor run there. Both have names, by which the next process finds them.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any

from holdfast.errors import InvalidRequestError, PreconditionError, UnavailableError
from holdfast.executor.ray_node import NodeState, RayNode
from holdfast.executor.ray_shape import bundles, described

NAMESPACE = "holdfast"
"""Of Ray's names: of the reservation, and of the actors."""
RESERVATION = "holdfast"
CREATED, REMOVED = "CREATED", "REMOVED"
TURN_S = 0.5
ANSWER_S_MAX = 5.0
EXIT_SIGNAL = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """What is asked for: ``gpus`` of each node, None: all; ``nodes``, None: all there are.

    ``words``, ``environ`` and ``folder`` are for the executors, see ``RayNode``.
    """

    address: str
    gpus: int | None
    nodes: int | None
    words: tuple[str, ...]
    environ: Mapping[str, str]
    folder: str = ""
    hold_s: float = 60.0


class RayCluster:
    """Runs from ``run`` until a signal: SIGTERM leaves all as it is, SIGINT ends all first.

    Args:
        options: What it reserves, and what runs there.

    Raises:
        InvalidRequestError: Ray is not installed.
        UnavailableError: no Ray cluster answers.
    """

    def __init__(self, options: RayOptions) -> None:
        self._options = options
        self._ray: Any = _ray()
        self._said: dict[str, str] = {}
        self._signals: list[int] = []
        self._news = threading.Event()
        self._group: Any = None
        self._actors: list[Any] = []
        self._asked: dict[int, Any] = {}
        self._states: dict[int, NodeState] = {}
        _connect(self._ray, options.address)

    @property
    def states(self) -> dict[int, NodeState]:
        """What the actors that answer have said, by the number of their node."""
        return dict(self._states)

    def run(self) -> int:
        """Return the exit code.

        Raises:
            PreconditionError: another reservation than asked for is there, or it was removed.
        """
        with ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._signalled)
                stack.callback(signal.signal, number, before)
            self.reserve()
            while not (self._signals or self.is_ready()):
                self._news.wait(TURN_S)
            while not self._signals or (signal.SIGTERM not in self._signals and self._goes_on()):
                self.turn(ending=bool(self._signals))
                self._news.wait(TURN_S)
                self._news.clear()
            if signal.SIGTERM in self._signals:
                return EXIT_SIGNAL + signal.SIGTERM
            self.remove()
            return EXIT_SIGNAL + signal.SIGINT

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        self._news.set()

    def _goes_on(self) -> bool:
        """Return whether executors are still ending, and nobody is tired of it."""
        return len(self._signals) == 1 and bool(self._actors) and not self.is_over()

    def reserve(self) -> None:
        """Ask Ray for the nodes, or find what was asked for before.

        Raises:
            InvalidRequestError: no number of nodes, or of GPUs, follows from the options.
            PreconditionError: what was reserved before is something else.
        """
        options, util = self._options, self._ray.util
        there = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        try:
            self._group = util.get_placement_group(RESERVATION)
        except ValueError:
            wanted = bundles(there, options.gpus, options.nodes)
            if self._reserved(wanted):
                return
        found = self._group.bundle_specs
        if options.gpus is None and options.nodes is None:
            return
        wanted = bundles(there, options.gpus, options.nodes or len(found))
        if found != wanted:
            raise PreconditionError(
                f"Ray has a reservation of {described(found)}, not of {described(wanted)}: start "
                "this command without --gpus and --nodes, and end that one by Ctrl-C"
            )

    def _reserved(self, wanted: list[dict[str, float]]) -> bool:
        """Ask Ray for nodes; return whether that was done, or another command was quicker."""
        util = self._ray.util
        try:
            self._group = util.placement_group(
                wanted, strategy="STRICT_SPREAD", name=RESERVATION, lifetime="detached"
            )
        except self._ray.exceptions.RaySystemError:
            self._group = util.get_placement_group(RESERVATION)
            return False
        return True

    def is_ready(self) -> bool:
        """Return whether Ray has reserved all nodes; then each has, or gets, its actor.

        Raises:
            PreconditionError: somebody has removed the reservation.
        """
        if self._state() != CREATED:
            self._tell("", f"waiting until Ray can reserve {described(self._group.bundle_specs)}")
            return False
        if not self._actors:
            self._tell("", f"reserved: {described(self._group.bundle_specs)}")
            self._actors = [self._actor(number) for number in range(self._group.bundle_count)]
        return True

    def turn(self, *, ending: bool) -> None:
        """Tell all actors whether it ends, and take in what they say; those that answer at once.

        Raises:
            PreconditionError: somebody has removed the reservation.
        """
        for number, actor in enumerate(self._actors):
            if number not in self._asked:
                self._asked[number] = actor.say.remote(ending=ending)
        asked = {ref: number for number, ref in self._asked.items()}
        answered, silent = self._ray.wait(list(asked), num_returns=len(asked), timeout=TURN_S)
        for ref in answered:
            self._take_in(asked[ref], ref)
        for ref in silent:
            self._miss(asked[ref])
        if len(self._states) < len(self._actors):
            self._state()

    def _take_in(self, number: int, ref: Any) -> None:
        del self._asked[number]
        errors = self._ray.exceptions
        try:
            state: NodeState = self._ray.get(ref, timeout=ANSWER_S_MAX)
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            self._miss(number)
            if isinstance(error, errors.ActorDiedError):
                why = str(error).strip().rpartition("\n")[2]
                self._tell(f"{number} died", f"node {number}: its Ray actor has died: {why}")
                self._actors[number] = self._actor(number)
            return
        self._states[number] = state
        runs = f"executor {state['executor']}" if state["executor"] else "no executor"
        self._tell(str(number), f"node {number}, {state['host']}: {runs}: {state['said']}")

    def _miss(self, number: int) -> None:
        self._states.pop(number, None)
        self._tell(str(number), f"node {number}: waiting for its Ray actor")

    def _state(self) -> str:
        """Return what has become of the reservation; one that has gone is refused."""
        known = self._ray.util.placement_group_table(self._group)  # none: Ray has begun anew
        state = str(known.get("state", REMOVED))
        if state == REMOVED:
            self.remove()
            raise PreconditionError("somebody has removed the reservation from Ray")
        return state

    def is_over(self) -> bool:
        """Return whether all nodes have heard that it ends, and none has an executor."""
        return len(self._states) == len(self._actors) and all(
            state["over"] for state in self._states.values()
        )

    def remove(self) -> None:
        """Give the nodes back to Ray. Executors that run there notice, and end their jobs."""
        for actor in self._actors:  # else Ray waits for a place where it can start it again
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)

    def _actor(self, number: int) -> Any:
        options = self._options
        ((kind, size),) = self._group.bundle_specs[number].items()
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=number
        )
        made = self._ray.remote(RayNode).options(
            name=f"{self._group.id.hex()}-{number}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=size if kind == "CPU" else 0,
            num_gpus=size if kind == "GPU" else 0,
            scheduling_strategy=strategy,
        )
        words = (*options.words, "--gpus", str(int(size)))
        return made.remote(words, dict(options.environ), options.folder, options.hold_s)

    def _tell(self, of: str, text: str) -> None:
        """Tell people once."""
        if self._said.get(of) != text:
            self._said[of] = text
            print(f"holdfast execute: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _ray() -> Any:
    try:
        import ray.util.scheduling_strategies  # noqa: PLC0415 - 2 s, and an extra
    except ImportError as cause:
        raise InvalidRequestError(
            'Ray is not installed here: pip install "holdfast[ray]"'
        ) from cause
    return ray


def _connect(ray: Any, address: str) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (OSError, RuntimeError, ValueError) as cause:
        raise UnavailableError(f"no Ray cluster answers at {address}: {cause}") from cause

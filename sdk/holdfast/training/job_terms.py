"""What a script asks of its job: checked against the node's memory, and registered.

One value, made once. Units: bytes, seconds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from holdfast import code_version
from holdfast.core.attempts import AttemptSpec
from holdfast.core.budget import MemoryWish, slots_per_rank
from holdfast.core.decision import Start
from holdfast.core.persistence_rules import PersistRule, Retention
from holdfast.core.protection import Parity, Protection
from holdfast.errors import ExhaustedError, InvalidRequestError
from holdfast.state.capture import Estimate
from holdfast.training import launch
from holdfast.training.session import AgentSession

DESCRIBE_S_MAX = 60.0

log = logging.getLogger(__name__)


def check_arguments(state: object, *, on_failure: str, checksum: str) -> None:
    """Do nothing if a Checkpointer can be made with these.

    Raises:
        InvalidRequestError: names the one that it cannot.
    """
    if on_failure not in ("degrade", "warn", "raise"):
        raise InvalidRequestError(
            f"on_failure={on_failure!r} is unknown: use 'degrade', 'warn' or 'raise'"
        )
    if checksum != "seal":
        raise InvalidRequestError(f"checksum={checksum!r} is not supported yet: use 'seal'")
    if not isinstance(state, MutableMapping):
        raise InvalidRequestError(
            f'state is a {type(state).__name__}: pass a dict, such as {{"model": model}}'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a script asks of its job, at this ``place`` in its launch.

    ``keep`` None leaves the job its policy; ``slots`` 0 takes as many as ``persist``
    needs. ``must_fit``: without the memory it does not begin.
    """

    job: str
    place: launch.RankPlace
    protection: Protection
    persist: PersistRule
    keep: Retention | None
    takeover: bool
    must_fit: bool
    slots: int = 0

    @property
    def _parity(self) -> Parity | None:
        return self.protection if isinstance(self.protection, Parity) else None

    def admit(self, session: AgentSession, estimate: Estimate, *, named: bool) -> Path:
        """Return the node's arena, after checking that the job fits its budget (P8).

        Args:
            session: With the agent of this node; it need not be open.
            estimate: What the state takes.
            named: Ranks name what they need of a checkpoint, if their state lets them.

        Raises:
            ExhaustedError: the job does not fit; a warning instead unless it ``must_fit``.
            UnavailableError: no agent answers on this node.
        """
        wish = MemoryWish(
            own_bytes=estimate.own_bytes * self.place.local_world_size,
            restored_bytes=estimate.restored_bytes(
                named=named,
                local_world_size=self.place.local_world_size,
                replicas=self.protection.copies.n,
            ),
            replicas=self.protection.copies.n,
            parity=self._parity,
            shards_count=self.place.local_world_size,
            nodes_count=self.place.nodes_count,
            slots=slots_per_rank(persist=self.persist.on, asked=self.slots),
            persist=self.persist.on,
        )
        node = session.describe(DESCRIBE_S_MAX, self.job, wish)
        if node.refusal:
            text = f"job {self.job} does not fit the arena of node {node.node}: {node.refusal}"
            error = ExhaustedError(text, job=self.job, node=node.node)
            if self.must_fit:
                raise error
            log.warning("%s", error)
        return Path(node.arena)

    def spec(self, start: Start | None, *, names_needs: bool) -> AttemptSpec:
        """Return what this rank says of its attempt; collective, since all ranks share the nonce.

        Raises:
            PreconditionError: several ranks and no process group yet.
        """
        return AttemptSpec(
            job=self.job,
            nonce=launch.nonce(os.environ, self.place),
            launcher=launch.launcher(os.environ),
            holder=launch.holder(),
            takeover=self.takeover,
            rank=self.place.rank,
            world_size=self.place.world_size,
            local_world_size=self.place.local_world_size,
            replicas=self.protection.copies.n,
            replica_domain=self.protection.copies.domain,
            parity=self._parity,
            persist=self.persist,
            retention=self.keep,
            start=start,
            names_needs=names_needs,
            slots=self.slots,
            origin=code_version.origin(os.environ) if self.place.rank == 0 else None,
        )

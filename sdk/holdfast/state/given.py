"""State that another framework has planned: who saves what is settled before it comes here.

A save of DCP or DeepSpeed brings tensors with their boxes, already shared out over the ranks, and
a tree of values. ``Given`` stands where a ``Capture`` stands: nothing is walked, nothing deferred,
and the save plan stays as long as names, dtypes, shapes and boxes do, whatever memory they lie in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from holdfast.format import blob as blobs
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import Json
from holdfast.state.capture import Estimate, LiveState
from holdfast.state.survey import Identity, Survey

_HEADER_BYTES_PER_TENSOR = 320


class Given:
    """What this rank saves next, as somebody else has planned it.

    Invariants: what was given stays as it is until the save that takes it has returned.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.optimizers: Sequence[Optimizer] = ()
        self._held_bytes = 0
        self._survey = Survey()
        self._static = blobs.Static(objects={}, aliases={}, world_size=world_size).encode()
        self._live = LiveState(blobs.Live().encode(), {}, {})

    def give(
        self,
        tensors: Sequence[tuple[TensorSpec, torch.Tensor]],
        tree: Mapping[str, Json],
        *,
        held_bytes: int = 0,
    ) -> None:
        """Take what the next save writes.

        Args:
            tensors: Each is stored under the name of its spec, which is a name of all ranks.
            tree: Values by key, encoded; a reference in it names a tensor of any rank.
            held_bytes: What this rank has of the state, together with what other ranks save for
                it: so much it loads in a restore. At least its own.
        """
        specs = {spec.fqn: spec for spec, _ in tensors}
        live = {spec.fqn: tensor for spec, tensor in tensors}
        self._live = LiveState(blobs.Live(tree=tree).encode(), live, {}, specs)
        self._held_bytes = held_bytes

    def survey(self) -> Survey:
        """Return that no tensor has a lasting identity."""
        return self._survey

    def identity(self, survey: Survey) -> Identity:
        """Return an identity that always holds."""
        return Identity(survey)

    def same_objects(self, live: LiveState) -> bool:
        """Tell that ``live`` is of the same objects: there are none."""
        return not live.objects

    def live(self, survey: Survey) -> LiveState:
        """Return what was given last."""
        del survey
        return self._live

    def static_text(self, survey: Survey) -> bytes:
        """Return the part of the text that is the same at each save."""
        del survey
        return self._static

    def never_defer(self, fqns: Iterable[str]) -> None:
        """Do nothing: nothing is deferred."""

    def thaw(self, fqns: Iterable[str], why: str) -> None:
        """Do nothing: nothing is frozen."""

    @property
    def surprises(self) -> Sequence[str]:
        """Return nothing: nothing is frozen."""
        return ()

    def estimate(self) -> Estimate:
        """Return the bytes of what was given last; the other ranks are taken to have as much."""
        own = sum(spec.length_bytes for spec in self._live.specs.values()) + len(self._live.text)
        own += _HEADER_BYTES_PER_TENSOR * len(self._live.specs)
        return Estimate(
            own_bytes=own,
            loaded_bytes=max(own, self._held_bytes),
            whole_bytes=own * self.world_size,
            names_needs=self.world_size > 1,
        )

"""What is true of a simulated application, and hidden from the scheduler.

A policy sees of it only what its jobs have measured by running.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.goodput.batches import BatchLimits
from holdfast.goodput.efficiency import GradientNoise

Placement = tuple[int, ...]
"""Replicas on each node, in the order of the allocation."""


class Truth(Protocol):
    """One application: how long its steps take, and what they are worth.

    Progress is counted in steps at the initial batch size. An epoch ends at ``ends_at(epoch)``; the
    job ends with the last of ``epochs``.
    """

    @property
    def name(self) -> str:
        """The family of its jobs."""

    @property
    def limits(self) -> BatchLimits:
        """The batches that its jobs allow."""

    @property
    def replicas_max(self) -> int:
        """The most replicas that its jobs can use."""

    @property
    def epochs(self) -> int:
        """How many epochs a job has."""

    def ends_at(self, epoch: int) -> float:
        """Return the progress at which ``epoch``, counted from 0, ends."""

    def times_s(self, placement: Placement, local_batch: int) -> tuple[float, float]:
        """Return the seconds of a micro-batch, and of one whose gradients are summed up."""

    def noise(self, batch: int, epoch: int) -> GradientNoise:
        """Return the noise of gradients in ``epoch`` at a batch of so many samples."""

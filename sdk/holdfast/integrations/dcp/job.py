"""DCP's saves in the memory of the agents: one job, its writer and its reader."""

from __future__ import annotations

from holdfast.integrations.dcp.job_reader import JobReader
from holdfast.integrations.dcp.job_writer import JobWriter
from holdfast.integrations.framework_job import FrameworkJob
from holdfast.integrations.planned_job import PlannedJob
from holdfast.training.ending import CLOSE_S_MAX


class HoldfastJob(FrameworkJob):
    """Keeps what ``dcp.save`` and ``dcp.async_save`` save in memory; see ``FrameworkJob``.

    ``writer`` and ``reader`` go into the calls of DCP. A ``checkpoint_id`` that ends in a number
    has the step; else a save is one step more than the last. Use the thread of ``async_save``: the
    job belongs to this process.
    """

    def _serve(self, job: PlannedJob) -> None:
        self.writer = JobWriter(job)
        self.reader = JobReader(job)

    def close(self, timeout_s: float = CLOSE_S_MAX) -> None:
        """As any job; a save that has ended without ``finish`` is given up."""
        self.writer.give_up_unfinished()
        super().close(timeout_s)

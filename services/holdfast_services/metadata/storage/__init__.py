"""The catalogue in SQL: one named statement per method, with its promise under concurrency.

Every method works on the connection of one transaction (see ``kit.db``). Whoever changes a run
holds its job's row (``lock_job``), so that all decisions about a run are taken one after the
other whichever process takes them; conditions in the statements guard what must never change.
"""

from __future__ import annotations

from holdfast_services.metadata.storage.base import DecodeCache
from holdfast_services.metadata.storage.holds import HoldStatements
from holdfast_services.metadata.storage.launches import LaunchStatements
from holdfast_services.metadata.storage.nodes import NodeStatements
from holdfast_services.metadata.storage.rollbacks import RollbackStatements
from holdfast_services.metadata.storage.runs import RunStatements

__all__ = ["Catalogue", "DecodeCache"]


class Catalogue(
    RunStatements, HoldStatements, NodeStatements, LaunchStatements, RollbackStatements
):
    """The statements of one transaction."""

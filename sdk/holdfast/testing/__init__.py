"""A cluster on one machine for users' own tests: real services, real launchers, real kills.

``Cluster`` runs the services of some nodes; ``Cluster.launch`` starts a script on them under
``holdfast run``. Both break things by name. docs/howto/testing.md
"""

from __future__ import annotations

from holdfast.testing.cluster import Cluster
from holdfast.testing.launch import Launch

__all__ = ["Cluster", "Launch"]

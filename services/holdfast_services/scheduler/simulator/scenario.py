"""What a simulation is told: the cluster, its rounds, what a move costs, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import InvalidRequestError
from holdfast_services.scheduler.domain.policies.facts import Node

ROUNDS_MAX = 1_000_000
"""A simulation that is not over by then has a policy that lets somebody wait for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Values of one simulation; the defaults are those of Pollux's published simulator.

    ``history``: jobs of a family share what they have measured. ``declares``: jobs say how many
    epochs they want. ``wrong_by``: what they say is off by a factor, log-normal with this sigma.
    ``at_once``: who arrives between two rounds gets what is free at once. ``noise``: step times
    vary from round to round, log-normal with this sigma; ``outliers``: so many of those that are
    measured are five times too long. ``mtbf_s``: mean time between failures of a node, 0: none;
    ``repeats_s``: work that a failure takes. ``spot_nodes`` of the nodes are spot, and taken away
    after ``spot_mtbf_s`` on average, with a notice of ``notice_s``. What is away is back after
    ``away_s``. ``price_per_gpu_h`` and ``spot_discount`` are for the cost.
    """

    nodes: int = 16
    gpus_per_node: int = 4
    round_s: float = 60.0
    restart_s: float = 30.0
    seed: int = 0
    history: bool = False
    declares: bool = True
    wrong_by: float = 0.0
    at_once: bool = False
    noise: float = 0.0
    outliers: float = 0.0
    mtbf_s: float = 0.0
    repeats_s: float = 10.0
    away_s: float = 1800.0
    spot_nodes: int = 0
    spot_mtbf_s: float = 14_400.0
    notice_s: float = 120.0
    price_per_gpu_h: float = 1.0
    spot_discount: float = 0.7

    def __post_init__(self) -> None:
        if not (1 <= self.nodes <= 10_000 and 1 <= self.gpus_per_node <= 64):
            raise InvalidRequestError(
                f"{self.nodes} nodes of {self.gpus_per_node} GPUs: 1 to 10000 of 1 to 64"
            )
        if not 0 <= self.spot_nodes <= self.nodes:
            raise InvalidRequestError(f"{self.spot_nodes} spot nodes of {self.nodes} nodes")
        if not self.round_s >= 1:
            raise InvalidRequestError(f"rounds of {self.round_s} s: at least 1")

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node

    def cluster(self) -> tuple[Node, ...]:
        """Return the nodes; the last ones are spot."""
        price = self.price_per_gpu_h * self.gpus_per_node
        first_spot = self.nodes - self.spot_nodes
        return tuple(
            Node(
                name=f"node{at:04d}",
                gpus=self.gpus_per_node,
                spot=at >= first_spot,
                price_per_h=price * (1 - self.spot_discount) if at >= first_spot else price,
            )
            for at in range(self.nodes)
        )

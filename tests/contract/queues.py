"""What tests of queues share."""

from __future__ import annotations

from holdfast_services.kit.queue import Claim

LONG_S = 60.0  # a lease, or a delay, that does not end in a test
WAIT_S_MAX = 30.0


def claim_one(queue, worker="w", wait_s=WAIT_S_MAX) -> Claim:
    (claim,) = queue.claim(worker, count_max=1, wait_s=wait_s)
    return claim

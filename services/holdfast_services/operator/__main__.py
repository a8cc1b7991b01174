"""`python -m holdfast_services.operator`: Kubernetes for the scheduler, until SIGTERM."""

from __future__ import annotations

from holdfast_services.kit.starting import start

if __name__ == "__main__":
    start("holdfast_services.operator.main")

"""`python -m holdfast_services.scheduler`: REST, and the lease if it can be had, until SIGTERM."""

from __future__ import annotations

from holdfast_services.kit.starting import start

if __name__ == "__main__":
    start("holdfast_services.scheduler.main")

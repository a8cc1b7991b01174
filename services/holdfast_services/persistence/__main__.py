"""``python -m holdfast_services.persistence``: a worker, until SIGTERM; see ``settings``."""

from __future__ import annotations

from holdfast_services.kit.starting import start

if __name__ == "__main__":
    start("holdfast_services.persistence.main")

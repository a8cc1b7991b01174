"""`python -m holdfast_services.metadata`: gRPC and REST in one loop, until SIGTERM.

With the argument `forget-memory`: make the catalogue forget all that was in memory only, and end.
"""

from __future__ import annotations

from holdfast_services.kit.starting import start

if __name__ == "__main__":
    start("holdfast_services.metadata.main")

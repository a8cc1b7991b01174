"""``python -m holdfast_services.supervisor``: run, or clean up, the embedded stack of one HOME.

Exit codes: 0, 1 failed, 2 usage, 3 a stack already runs in this HOME.
"""

from __future__ import annotations

from holdfast_services.kit.starting import start

if __name__ == "__main__":
    start("holdfast_services.supervisor.main")

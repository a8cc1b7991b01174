"""``python -m holdfast_services.agent``: one node's agent; see ``settings`` for its environment."""

from __future__ import annotations

from holdfast_services.kit.starting import start

if __name__ == "__main__":
    start("holdfast_services.agent.main")

"""The worker's decisions: what an item asks, which parts to send, what to believe. Pure."""

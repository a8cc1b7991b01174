"""Loops by the clock: they tick, offer due items to the queue and expire checkpoints."""

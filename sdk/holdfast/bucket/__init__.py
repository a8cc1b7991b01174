"""Checkpoints as they lie in an object store: list, read, verify. Needs no service, no torch."""

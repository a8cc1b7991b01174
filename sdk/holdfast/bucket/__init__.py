"""Checkpoints in an object store: list, read, write, verify. Needs no service, no torch."""

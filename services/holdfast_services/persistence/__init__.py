"""The persistence worker: memory -> object store, and what keeps the object store in order."""

"""The embedded stack: one metadata service and the node agents of this machine, kept running."""

"""Use cases: each a function of the statements of one transaction."""

"""What the clock brings: the lease, turns, plans."""

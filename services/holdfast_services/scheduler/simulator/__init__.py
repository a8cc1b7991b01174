"""The simulator: the scheduler's own rules over the jobs of a trace."""

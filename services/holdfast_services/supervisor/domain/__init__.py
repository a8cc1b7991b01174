"""The supervisor's decisions, pure."""

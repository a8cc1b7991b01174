"""Policies: which GPUs each job should have, from facts and a time, and why."""

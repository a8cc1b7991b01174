"""The scheduler: jobs, who has which GPUs, and what follows from a plan."""

"""The scheduler: which job gets which GPUs."""

"""The training side of a job: launch, session with the agent, saving, restoring."""

"""What agents, workers and users ask of the catalogue, each one transaction."""

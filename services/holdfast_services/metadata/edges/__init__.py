"""Who calls: agents and workers over gRPC, people and scripts over REST, Prometheus."""

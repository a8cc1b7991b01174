"""The operator: Kubernetes as a cluster of nodes that launchers run on, and of jobs."""

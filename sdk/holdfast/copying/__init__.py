"""Copies between tensors and host memory: on the host, or on a device's streams beside training."""

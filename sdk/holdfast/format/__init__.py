"""The formats that last: segments, sidecars, manifests, the index, the state blob's parts. Pure."""

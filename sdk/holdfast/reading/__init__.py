"""Reads the tensors of one checkpoint, addressed by name and box, from wherever its bytes are."""

"""The rules of the catalogue: pure functions over facts. No clock, no I/O, no framework."""

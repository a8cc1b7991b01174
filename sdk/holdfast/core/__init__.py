"""The shared kernel: words and rules that need no I/O, no clock and no torch."""

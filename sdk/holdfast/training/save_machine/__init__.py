"""The save machine: the pure rules of one rank's saves, what happens to it, what it remembers."""

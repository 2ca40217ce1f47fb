"""Training runs: the entry points and the loop."""

"""The training loop and its parts, and what trains many times."""

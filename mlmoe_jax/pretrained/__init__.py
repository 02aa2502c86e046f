"""Published weights: which there are, where they lie, and how their names map to ours."""

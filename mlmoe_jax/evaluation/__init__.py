"""Scores and metrics of a split, thresholds, the comparison of runs; may use inference and the rooms below."""

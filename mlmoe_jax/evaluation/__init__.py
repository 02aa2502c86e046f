"""Scores and metrics of a split, thresholds; may use inference and the packages below."""

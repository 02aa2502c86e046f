"""Scoring a split, thresholds, comparing runs."""

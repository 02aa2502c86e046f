"""Metrics of multi-label predictions."""

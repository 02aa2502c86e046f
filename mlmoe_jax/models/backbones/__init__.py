"""Frozen (or trainable) feature extractors."""

"""Feature extractors, frozen or trainable."""

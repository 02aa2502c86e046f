"""Published weights: download, reading, and conversion in both directions; may use models and the packages below."""

"""Programs that each measure what one table of the documentation reports; `__main__.py` runs them by name."""

"""The audit of labels: suggested corrections, as a page and a table."""

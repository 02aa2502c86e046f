"""Sharing a run: the model card and the upload to the hub."""

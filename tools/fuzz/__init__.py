"""Damaged and hostile input for every reader of the package."""

"""One file a family of heads."""

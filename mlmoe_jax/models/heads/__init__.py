"""One file per family of heads."""

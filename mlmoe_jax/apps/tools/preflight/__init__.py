"""Cost and compilation of a training, checked before it starts."""

"""Convolutions and max pooling in forms that are fast where XLA's own are not."""

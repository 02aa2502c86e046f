"""Text towers: the networks that turn the name of a label into a vector in the space of a backbone's images."""

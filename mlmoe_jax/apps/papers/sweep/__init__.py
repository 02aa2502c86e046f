"""Many trainings that differ in a few keys."""

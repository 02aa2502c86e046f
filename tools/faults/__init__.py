"""Trainings that are hit by signals, full disks and damaged files."""

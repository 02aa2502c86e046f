"""The run folder: its files, checkpoints, restoring a model, logs."""

"""From files to batches: sources, label statistics, host transforms, device augmentation, the pipeline."""

"""What the papers' methods set, shared by the files in `configs/`."""

"""The published settings of the methods, shared by the files in `configs/`."""

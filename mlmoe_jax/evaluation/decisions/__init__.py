"""How scores become decisions: fits of thresholds and of the calibration."""

"""Where images and labels come from: one module per data set; `open` opens them by name."""

"""How the tensor names of published files map to our parameter paths: one file a source."""

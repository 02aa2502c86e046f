"""Tables that map the tensor names of published files to parameter paths."""

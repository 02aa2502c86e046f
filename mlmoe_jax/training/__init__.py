"""The training loop and its parts, and all that trains more than once; may use evaluation and the rooms below."""

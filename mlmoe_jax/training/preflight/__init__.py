"""What a training will cost and whether it compiles, known before it starts."""

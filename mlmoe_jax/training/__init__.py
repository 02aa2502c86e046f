"""The training loop, its step, state, optimizer and selection; may use evaluation and the packages below."""

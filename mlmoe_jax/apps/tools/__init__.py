"""Commands around a training: check, pack, prune, compare, compile."""

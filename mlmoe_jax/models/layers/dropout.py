"""Whether dropout changes what it is applied to."""

from flax import nnx


def drops(dropout: nnx.Dropout) -> bool:
    """Return whether a module drops entries: in training, at a rate above 0."""
    return not dropout.deterministic and dropout.rate > 0

from pathlib import Path

from flax import nnx

from mlmoe_jax.pretrained.load import apply_rules, fill, read_tensors
from mlmoe_jax.pretrained.rules.base import Layout


def load_as(layout: Layout, module: nnx.Module, path: Path) -> None:
    """Fill a module from a file in a given layout, which is not recognized from the names."""
    fill(module, apply_rules(path, read_tensors(path), layout))

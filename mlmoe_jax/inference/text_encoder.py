"""From the names of labels to their vectors, by the text tower that was trained with a backbone."""

from __future__ import annotations

from ml_collections import ConfigDict

from mlmoe_jax.data.labels.name_vectors import NameVectors, is_vectors_file, read_name_vectors
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import quantity


def vectors_for(config: ConfigDict) -> NameVectors | None:
    """Return the vectors of the label names that `model.head.names` names; None if it is empty.

    Raises:
      UserError: the file cannot be read, or it is empty although the head is `cosine`.
    """
    file = config.model.head.names
    if not file:
        if config.model.head.kind == "cosine":
            raise UserError(
                "model.head.kind=cosine starts from the vectors of the label names; set model.head.names to their file"
            )
        return None
    if not is_vectors_file(file):
        raise UserError(f"model.head.names is {file}, which is no .safetensors file")
    vectors = read_name_vectors(file)
    status(f"{file}: vectors of {quantity(len(vectors.names), 'name')}, sha256 {vectors.sha256[:12]}")
    return vectors

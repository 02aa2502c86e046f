"""The check of shapes and types around the functions of the models, which are imported after this module."""

import re

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

CHECKED = (
    "mlmoe_jax.data.labels",
    "mlmoe_jax.data.prepare",
    "mlmoe_jax.data.split",
    "mlmoe_jax.data.transforms",
    "mlmoe_jax.evaluation.metrics",
    "mlmoe_jax.models.backbones.convnext",
    "mlmoe_jax.models.backbones.convolutional",
    "mlmoe_jax.models.backbones.efficientnet",
    "mlmoe_jax.models.backbones.resnet",
    "mlmoe_jax.models.experts",
    "mlmoe_jax.models.heads",
    "mlmoe_jax.models.layers.batch_norm",
    "mlmoe_jax.models.layers.beam_search",
    "mlmoe_jax.models.layers.detr",
    "mlmoe_jax.models.losses",
    "mlmoe_jax.models.query_decoder",
)
_ARRAYS = re.compile(r"\b(Bool|Float|Float32|Int8|Int32|Int64|Integer|Num|Real|Shaped|UInt8)\[")


def checked(function, *args, **options):
    """Check the arguments and the result of a function at every call, if its signature has the shape of an array."""
    hints = getattr(function, "__annotations__", {}).values()
    if not any(_ARRAYS.search(str(hint)) for hint in hints):
        return function
    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)  # an int is a float


install_import_hook(CHECKED, f"{__name__}.checked")

"""The types of matrix products and of frozen weights that a config means by `auto`."""

import jax
from ml_collections import ConfigDict

AUTO = "auto"
KEYS = ("model.dtype", "model.frozen_dtype")


def types(config: ConfigDict, platform: str = "") -> tuple[str, str]:
    """Return the types of matrix products and of frozen weights on a platform; "" = the one that JAX uses here.

    Products in bfloat16 are several times as fast as in float32 on GPUs and TPUs, but not on most CPUs. They round
    frozen weights to bfloat16 anyway, so these are stored in it, unless they are evaluated in products of another type.
    """
    model = config.model
    products = model.dtype
    if products == AUTO:
        products = "float32" if (platform or jax.default_backend()) == "cpu" else "bfloat16"
    if model.frozen_dtype != AUTO:
        return products, model.frozen_dtype
    rounded = products == "bfloat16" and config.eval.dtype in ("same", "bfloat16")
    return products, "bfloat16" if rounded else "float32"


def settle(config: ConfigDict, platform: str) -> None:
    """Replace `auto` in a config by its meaning on a platform, so that a run folder records it."""
    config.model.dtype, config.model.frozen_dtype = types(config, platform)


def kept(config: ConfigDict, stored: ConfigDict) -> dict[str, str]:
    """Return the keys whose type is `auto` in a config, with the types of a stored one."""
    names = (key.removeprefix("model.") for key in KEYS)
    return {f"model.{name}": stored.model[name] for name in names if config.model[name] == AUTO}

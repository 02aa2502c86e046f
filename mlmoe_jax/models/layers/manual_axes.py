"""Arrays inside `jax.shard_map`, whose default checks want all arguments of a custom gradient to vary alike."""

import jax


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Return the arrays, each varying over all mesh axes over which one of them varies.

    The gradient of an array that is equal on all devices is then the sum of their gradients, as for JAX's own
    operations. Outside `jax.shard_map`, no array varies, and all are returned unchanged.
    """
    axes = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    missing = [tuple(frozenset().union(*axes) - own) for own in axes]
    return [jax.lax.pcast(x, new, to="varying") if new else x for x, new in zip(arrays, missing, strict=True)]

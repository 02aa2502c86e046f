"""How a backward pass of our own computes arrays again instead of keeping them."""

import jax

SMALL = 2**16  # values per image


def of_backward_pass(kept: jax.Array, slope: jax.Array) -> jax.Array:
    """Return `kept` [B,…] unchanged, as a value that is known only in the backward pass; `slope` has the same shape.

    Without it, XLA finds that the forward pass computed the same arrays from `kept`, and keeps them for the backward
    pass. `jax.lax.optimization_barrier` would do as well, if the CPU compiler of JAX 0.10 did not remove it. It is used
    on all platforms: on a CPU, a training step takes as long as without it; compiled for a TPU, it accesses fewer bytes
    (docs/performance.md). Arrays of fewer values per image than SMALL are left to XLA, because a narrow ViT has memory
    enough and loses time. Where the slope is not finite, the value is NaN; the gradient is not finite either way.
    """
    if kept.size < SMALL * kept.shape[0]:
        return kept
    return kept + (0 * slope).astype(kept.dtype)

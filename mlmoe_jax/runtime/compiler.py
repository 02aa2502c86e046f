"""The options with which XLA compiles the programs of this package, and known errors of JAX versions.

Options are given to each program, not to the process in XLA_FLAGS, which XLA reads only once. They therefore hold for
the command line and for Python, whatever was computed before.
"""

import os

import jax

Options = dict[str, bool | int | str]

_VECTORS, _YNNPACK = "xla_cpu_prefer_vector_width", "xla_cpu_experimental_ynn_fusion_type"
_PRODUCTS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"  # all kinds but sums
_FIRST_RIGHT_ON_GPUS = (0, 11, 2)


def compiler_options(platform: str, *, many_rows: bool = False) -> Options:
    """Return the options of a program for a JAX platform, {} unless it is a CPU. Options in XLA_FLAGS are left out.

    XLA uses vectors of 512 bits, instead of 256, on a CPU that has them. Wide vectors speed up GELU, normalizations and
    depthwise convolutions, but not matmuls. All gradients of ConvNeXt-T take 0.8 of the time, and a training step of
    DR-MoE on ResNet-101 takes 0.92.

    Args:
      many_rows: whether sums are over products of any shape. YNNPACK does not compute them then: in JAX 0.10.2, sums
        over the columns of a matmul that contracts three columns are wrong from row 32,768 on (jax issue 39103). XLA's
        own sums make a softmax two to five times as slow, so the option is only for programs without one.
    """
    if platform != "cpu":
        return {}
    options: Options = {_VECTORS: 512}
    if many_rows:
        options[_YNNPACK] = _PRODUCTS
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in given}


def known_errors(device: jax.Device) -> str:
    """Return how this JAX version is known to compute wrong results on a device, as a sentence; "" if it is not."""
    if device.platform != "gpu" or jax.__version_info__ >= _FIRST_RIGHT_ON_GPUS:
        return ""
    fusions = ", 39486 fused operations" if getattr(device, "compute_capability", "") == "12.0" else ""
    return (
        f"JAX {jax.__version__} is known to compute wrong results on GPUs without an error (jax issues 39336 scaled "
        f"biases, 40564 gradients of maxima{fusions}); install JAX 0.11.2 or newer, which needs Python 3.12"
    )

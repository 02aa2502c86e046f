"""Counts of multiply-adds in jaxprs."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx


def count_macs(jaxpr) -> int:
    """Return the multiply-adds of all dot products and convolutions in a jaxpr and its inner jaxprs.

    A scan counts its body once per iteration, a while loop counts it once, and a cond its most expensive branch.
    """
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        parameters = equation.params
        if name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out_axis = parameters["dimension_numbers"].rhs_spec[0]
            total += equation.outvars[0].aval.size * math.prod(kernel) // kernel[out_axis]
        else:
            inner = [count_macs(sub) for value in parameters.values() for sub in _jaxprs(value)]
            total += max(inner) if name == "cond" and inner else parameters.get("length", 1) * sum(inner)
    return total


def forward_macs(module: Any, *inputs: Any) -> tuple[int, Any]:
    """Return the multiply-adds of `module(*inputs)` and its abstract output. Parameters and inputs may be abstract."""
    structure, state = nnx.split(module)
    trace = jax.make_jaxpr(lambda state, *inputs: nnx.merge(structure, state)(*inputs), return_shape=True)
    jaxpr, output = trace(state, *inputs)
    return count_macs(jaxpr.jaxpr), output


def _jaxprs(value: Any) -> list:
    if hasattr(value, "eqns"):
        return [value]
    if hasattr(value, "jaxpr"):
        return [value.jaxpr]
    return [sub for item in value for sub in _jaxprs(item)] if isinstance(value, tuple | list) else []

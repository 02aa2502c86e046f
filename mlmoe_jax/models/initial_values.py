"""Initial values, drawn only where no file gives a value.

`nnx.eval_shape(build)` returns a module without values: each is a ShapeDtypeStruct. A file fills those that it holds,
and `draw_missing` draws the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun


def draw_missing(module: nnx.Module, build: Callable[[], nnx.Module], among: Collection[str] | None = None) -> None:
    """Give the values of a module that are ShapeDtypeStructs those that `build()` would give them, to the last bit.

    build: returns a new module with the same parameter paths. among: the paths of values that may be drawn; None = all.
    """
    missing = {
        path: (place, variable)
        for path, (place, variable) in _variables(module).items()
        if isinstance(variable.get_value(), jax.ShapeDtypeStruct) and (among is None or path in among)
    }
    if not missing:
        return

    def initial() -> dict[str, jax.Array]:
        return {path: found.get_value() for path, (_, found) in _variables(build()).items() if path in missing}

    drawn = _without_dead_code(initial)
    values = {place: variable.replace(drawn[path]) for path, (place, variable) in missing.items()}
    nnx.update(module, nnx.from_flat_state(values))


def _variables(module: nnx.Module) -> dict[str, tuple[tuple, nnx.Variable]]:
    """Return {path: (position, variable)} of all variables of a module."""
    return {"/".join(map(str, place)): (place, found) for place, found in nnx.to_flat_state(nnx.state(module))}


def _without_dead_code(function: Callable[[], Any]) -> Any:
    """Return the result of a function without the operations that do not contribute to it.

    They run one after another, as in a call of the function: a single program of all could round in other places.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)()
    needed = {result for result in traced.jaxpr.outvars if isinstance(result, Var)}
    live = []
    for equation in reversed(traced.jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            live.append(equation)
            needed.update(value for value in equation.invars if isinstance(value, Var))
    used = ClosedJaxpr(traced.jaxpr.replace(eqns=live[::-1]), traced.consts)
    return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(used)())

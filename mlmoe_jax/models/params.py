"""Parameters and statistics of a model as flat dictionaries over public parameter paths.

The path of a parameter is its position in the model joined by '/', such as `backbone/blocks/3/attn/qkv/kernel`. Rules,
checkpoints, tables and messages use these paths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

from mlmoe_jax.models import partition, rules
from mlmoe_jax.runtime.table import Column, Table

Params = dict[str, jax.Array]


def named_variables(module: nnx.Module, *kinds: type[nnx.Variable]) -> dict[str, tuple[tuple, nnx.Variable]]:
    """Return the variables of a module as {path: (position, variable)}, only of the types `kinds` if any are given."""
    state = nnx.state(module, kinds) if kinds else nnx.state(module)
    return {"/".join(map(str, position)): (position, variable) for position, variable in nnx.to_flat_state(state)}


class ModelDef:
    """The structure of a model without its values, which `split` separates and `merge` joins again."""

    def __init__(self, graphdef: nnx.GraphDef, variables: dict[str, tuple[tuple, nnx.Variable]]):
        self._graphdef = graphdef
        self._variables = variables

    @classmethod
    def split(cls, model: nnx.Module) -> tuple[ModelDef, Params, Params]:
        """Return structure, parameters {path: value} and batch statistics {path: value} of a module.

        The values are abstract for the result of `nnx.eval_shape`.
        """
        graphdef = nnx.graphdef(model)
        variables = named_variables(model)
        params, stats = (
            {path: v.get_value() for path, (_, v) in variables.items() if isinstance(v, kind)}
            for kind in (nnx.Param, nnx.BatchStat)
        )
        if other := set(variables) - set(params) - set(stats):
            raise ValueError(f"a model holds parameters and batch statistics only, not {sorted(other)}")
        shapes = {
            path: (position, v.replace(jax.ShapeDtypeStruct(v.shape, v.dtype)))
            for path, (position, v) in variables.items()
        }
        return cls(graphdef, shapes), params, stats

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return {path: ShapeDtypeStruct} of all parameters and batch statistics."""
        return {path: variable.get_value() for path, (_, variable) in self._variables.items()}

    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """Return {path: names of the axes} of parameters with a named axis, see `partition.axes`; None = no name."""
        return {path: names for path, (_, v) in self._variables.items() if any(names := partition.axis_names(v))}

    def merge(self, *values: Params) -> nnx.Module:
        """Return a new module with the values of dictionaries {path: value}, which together must contain every path."""
        joined = {path: value for part in values for path, value in part.items()}
        state = nnx.from_flat_state(
            {position: v.replace(joined[path]) for path, (position, v) in self._variables.items()}
        )
        return nnx.merge(self._graphdef, state, copy=True)

    def read_stats(self, model: nnx.Module) -> Params:
        """Return the current batch statistics, {path: value}, of `model`, a module that `merge` returned."""
        return {path: variable[...] for path, (_, variable) in named_variables(model, nnx.BatchStat).items()}


def split_trainable(params: Params, trainable_rules: Sequence[tuple[str, bool]]) -> tuple[Params, Params]:
    """Split parameters {path: value} into two dictionaries, (trainable, frozen).

    The first regex of the (regex, bool) pairs that matches a path decides; True = trainable. Raises UserError if no
    rule matches a path.
    """
    trains = rules.assign(trainable_rules, params)
    return (
        {path: value for path, value in params.items() if trains[path]},
        {path: value for path, value in params.items() if not trains[path]},
    )


def fingerprint(params: dict[str, Any]) -> str:
    """Return the sha256 of the paths, types, shapes and bytes of all arrays in `params`, as a hexadecimal string.

    Arrays in float64, which weights are with JAX_ENABLE_X64, are hashed in float32, in which weights are stored.
    """
    digest = hashlib.sha256()
    for path in sorted(params):
        value = np.asarray(jax.device_get(params[path]))
        value = value.astype(np.float32) if value.dtype == np.float64 else value
        digest.update(f"{path} {value.dtype} {value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def module_rows(trainable: Params, frozen: Params) -> dict[str, tuple[int, int]]:
    """Return {first two levels of paths: (number of parameters, number of trainable parameters)}."""
    rows: dict[str, tuple[int, int]] = {}
    for params, learns in ((trainable, 1), (frozen, 0)):
        for path, value in params.items():
            parts = path.split("/")
            name = "/".join(parts[: min(2, max(1, len(parts) - 1))])
            total, learned = rows.get(name, (0, 0))
            rows[name] = total + value.size, learned + value.size * learns
    return rows


def parameter_table(trainable: Params, frozen: Params) -> Table:
    """Return a table of modules with their total and trainable parameters, and a note with the sums."""
    rows = module_rows(trainable, frozen)
    total = sum(count for count, _ in rows.values())
    learned = sum(count for _, count in rows.values())
    columns = ["module", Column("parameters", width=13), Column("trainable", width=13)]
    note = f"{learned:,} of {total:,} parameters trainable ({100 * learned / total:.2f} %)"
    return Table(columns, [[name, *counts] for name, counts in rows.items()], notes=[note])


# ---------------------------------------------------------------------------------------------------- initial values
def draw_missing(module: nnx.Module, build: Callable[[], nnx.Module], drawable: Collection[str] | None = None) -> None:
    """Replace the abstract values of a module, in place, by the initial values of `build()`, exactly.

    `nnx.eval_shape(build)` returns a module with abstract values. A weights file then provides some of the values. This
    function draws those that the file lacks, if their paths are in `drawable` (None = all).
    """
    missing = {
        path: (position, variable)
        for path, (position, variable) in named_variables(module).items()
        if isinstance(variable.get_value(), jax.ShapeDtypeStruct) and (drawable is None or path in drawable)
    }
    if not missing:
        return

    def initial() -> dict[str, jax.Array]:
        return {
            path: variable.get_value() for path, (_, variable) in named_variables(build()).items() if path in missing
        }

    values = _without_dead_code(initial)
    state = {position: variable.replace(values[path]) for path, (position, variable) in missing.items()}
    nnx.update(module, nnx.from_flat_state(state))


def _without_dead_code(function: Callable[[], Any]) -> Any:
    """Return `function()`, without running the operations that do not contribute to its result.

    The operations run one after another, as in an eager call. One jitted program could round differently.
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

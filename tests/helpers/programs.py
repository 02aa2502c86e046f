"""What traced programs compute."""

from collections.abc import Iterator

import jax


def equations(jaxpr) -> Iterator:
    """Yield every equation of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from equations(getattr(value, "jaxpr", value))


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def calls(jaxpr, primitive: str) -> int:
    """Return how often a primitive occurs in a jaxpr."""
    return sum(equation.primitive.name == primitive for equation in equations(jaxpr))


def without_dead_code(jaxpr):
    """Return a jaxpr with only those of its equations from which an output is computed."""
    needed, equations = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(map(id, equation.outvars)):
            equations.append(equation)
            needed |= set(map(id, equation.invars))
    return jaxpr.replace(eqns=equations[::-1])

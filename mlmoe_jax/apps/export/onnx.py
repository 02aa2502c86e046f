"""Convert a run to ONNX."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

from mlmoe_jax.apps.export.program import image_shape, program_of, weights_of
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.restore import Run

OPSET = 21  # ONNX Runtime 1.17 and newer
# Head -> the reason why the converter fails on it.
_REFUSED = {"cnn_rnn": "its beam search is a loop with an integer remainder, rem, over an open number of images"}
_INSTALL = 'pip install "mlmoe-jax[onnx]" and then pip install --no-deps jax2onnx'


def require_converter() -> None:
    """Raise UserError if the packages of the extra `onnx` are not installed."""
    for name in ("onnxruntime", "onnx", "jax2onnx"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--format=onnx needs the package {name}: {_INSTALL}")


def write_onnx(run: Run, folder: Path) -> None:
    """Write model.onnx, with tensors above 1 MB in model.onnx.data; input `image`, output `probability`.

    Raises UserError if the converter does not support an operation of the model.
    """
    if reason := _REFUSED.get(run.config.model.head.kind):
        raise _not_converted(run, reason)
    from jax2onnx import to_onnx

    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns of every intermediate value without a type
    images, weights, label = image_shape(run), weights_of(run), program_of(run)
    traced = jax.make_jaxpr(lambda image: label(weights, image))(images)

    # The converter is given operations, not our functions: it replaces functions of jax.numpy and nnx while it traces,
    # and its replacements do not have all their arguments.
    def simpler(image: jax.Array) -> jax.Array:
        return _evaluate(traced.jaxpr, traced.consts, [image])[0]

    try:
        to_onnx(
            simpler,
            [images],
            opset=OPSET,
            input_names=["image"],
            output_names=["probability"],
            return_mode="file",
            output_path=str(folder / "model.onnx"),
        )
    except Exception as error:  # whatever a rule of the converter raises for a case that it does not have
        reason = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0].rstrip(".")
        raise _not_converted(run, reason) from error


def _not_converted(run: Run, reason: str) -> UserError:
    model = run.config.model
    return UserError(
        f"jax2onnx cannot convert the head {model.head.kind} on {model.backbone.name} ({reason}); export it with "
        "--format=stablehlo"
    )


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Evaluate traced operations, with those of _SIMPLER replaced, also inside functions that are called.

    Of the forms of `jax.lax.platform_dependent`, the default is evaluated.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    for equation in jaxpr.eqns:
        given = [atom.val if isinstance(atom, Literal) else known[atom] for atom in equation.invars]
        name, settings = equation.primitive.name, equation.params
        if name in _SIMPLER:
            results = [_SIMPLER[name](*given, settings)]
        elif name == "platform_index":
            results = [None]  # read by the choice below only
        elif name == "cond" and settings["branches_platforms"] is not None:
            body = settings["branches"][settings["branches_platforms"].index(None)]
            results = _evaluate(body.jaxpr, body.consts, given[1:])
        elif name in _BODIES:
            body = settings[_BODIES[name]]
            results = _evaluate(body.jaxpr, body.consts, given)
        else:
            results = equation.primitive.bind(*given, **settings)
            results = results if equation.primitive.multiple_results else [results]
        known |= dict(zip(equation.outvars, results, strict=True))
    return [atom.val if isinstance(atom, Literal) else known[atom] for atom in jaxpr.outvars]


def _max_pool(maps: jax.Array, settings: Mapping[str, Any]) -> jax.Array:
    """Pool f32[B,H,W,C] with images and channels in one axis: runtimes pool over at most three axes."""
    batch, height, width, channels = maps.shape
    planes = maps.transpose(0, 3, 1, 2).reshape(batch * channels, height, width)
    shorter = {key: value[:3] for key, value in settings.items()}
    pooled = jax.lax.reduce_window(planes, -np.inf, jax.lax.max, **shorter)
    return pooled.reshape(batch, channels, *pooled.shape[1:]).transpose(0, 2, 3, 1)


# Operations that call a function -> the setting that holds it.
_BODIES = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
_SIMPLER: dict[str, Callable[..., jax.Array]] = {
    "reduce_window_max": _max_pool,
    "stop_gradient": lambda value, settings: value,
}

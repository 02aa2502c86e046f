"""Convert a run to ONNX."""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from mlmoe_jax.apps.export.program import image_shape, program_of
from mlmoe_jax.apps.export.targets import Export, ExportTarget
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.models.layers.batch_norm import fold_batch_norms
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.runtime.storage import require_new

_OPSET = 21  # ONNX Runtime 1.17 and newer
_INSTALL = 'in the folder with pyproject.toml, run pip install -e ".[onnx]" and then pip install --no-deps jax2onnx'


def _place(output: str) -> Path:
    for name in ("onnxruntime", "onnx", "jax2onnx"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--format=onnx needs the package {name}: {_INSTALL}")
    return require_new(output)


def _write(job: Export) -> str:
    """Write model.onnx with the input `image` and the outputs of the job, and return a few words for the message.

    Tensors above 1 MB are written to model.onnx.data.
    """
    run = job.run
    from jax2onnx import to_onnx

    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns about every intermediate value without a type
    model = run.definition.merge(run.weights())
    fold_batch_norms(model)
    definition, params, stats = ModelDef.split(model)
    weights = jax.device_put({**params, **stats})  # a traced index takes no row of an array of NumPy
    images, label = image_shape(run), program_of(replace(run, definition=definition), job.outputs)
    traced = jax.make_jaxpr(lambda image: [*map(label(weights, image).get, job.outputs)])(images)

    # The converter receives operations, not functions: while tracing, it replaces functions of jax.numpy and nnx by its
    # own, which lack some arguments.
    def simpler(image: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_evaluate(traced.jaxpr, traced.consts, [image]))

    try:
        to_onnx(
            simpler,
            [images],
            opset=_OPSET,
            normalization_mode="prefer_native",
            input_names=["image"],
            output_names=[*job.outputs],
            return_mode="file",
            output_path=str(job.path / "model.onnx"),
        )
    except Exception as error:  # a rule of the converter may raise anything for an unsupported case
        model = f"the head {run.config.model.head.kind} on {run.config.model.backbone.name}"
        raise UserError(
            f"jax2onnx cannot convert {model} ({reason_of(error)}); export it with --format=stablehlo"
        ) from error
    return f"opset {_OPSET}"


def _load(folder: Path) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=onnxruntime.get_available_providers())
    names = [output.name for output in session.get_outputs()]
    return lambda images: dict(zip(names, session.run(names, {"image": images}), strict=True))


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr, including the called functions, and replace the operations that are keys of _SIMPLER.

    For `jax.lax.platform_dependent`, the default branch is evaluated. `consts` and `arguments` are the values of
    `jaxpr.constvars` and `jaxpr.invars`. The result has the values of `jaxpr.outvars`.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    for equation in jaxpr.eqns:
        inputs = [atom.val if isinstance(atom, Literal) else known[atom] for atom in equation.invars]
        name, settings = _function_of(equation), equation.params
        if name in _SIMPLER:
            results = [_SIMPLER[name](*inputs, settings)]
        elif name == "platform_index":
            results = [None]  # read by the cond below only
        elif name == "cond" and settings["branches_platforms"] is not None:
            body = settings["branches"][settings["branches_platforms"].index(None)]
            results = _evaluate(body.jaxpr, body.consts, inputs[1:])
        elif name in _BODIES:
            body = settings[_BODIES[name]]
            results = _evaluate(body.jaxpr, body.consts, inputs)
        else:
            results = equation.primitive.bind(*inputs, **settings)
            results = results if equation.primitive.multiple_results else [results]
        known |= dict(zip(equation.outvars, results, strict=True))
    return [atom.val if isinstance(atom, Literal) else known[atom] for atom in jaxpr.outvars]


def _function_of(equation: JaxprEqn) -> str:
    """Return "PRIMITIVE FUNCTION", with the name of the called function, if _SIMPLER has it; else "PRIMITIVE"."""
    name, settings = equation.primitive.name, equation.params
    function = settings["call_jaxpr"].jaxpr.debug_info.func_name if name == "custom_vjp_call" else settings.get("name")
    return called if (called := f"{name} {function}") in _SIMPLER else name


def _matmul(left: jax.Array, right: jax.Array, settings: Mapping[str, Any]) -> jax.Array:
    """Return the product of `left` […,m] and `right` [m,n] by `jnp.matmul`, and any other product by `dot_general`.

    `settings` are the parameters of the traced `dot_general`. The converter writes `jnp.matmul` as MatMul, which ONNX
    runtimes recognize as a linear layer, but `dot_general` as Einsum.
    """
    if right.ndim == 2 and settings["dimension_numbers"] == (((left.ndim - 1,), (0,)), ((), ())):
        return jnp.matmul(left, right)
    return jax.lax.dot_general_p.bind(left, right, **settings)


def _layer_norm(tokens: jax.Array, scale: jax.Array, bias: jax.Array, settings: Mapping[str, Any]) -> jax.Array:
    [epsilon] = [
        atom.val
        for equation in settings["call_jaxpr"].jaxpr.eqns
        for atom in equation.invars
        if equation.primitive.name == "add" and isinstance(atom, Literal)
    ]
    layer = nnx.LayerNorm(tokens.shape[-1], epsilon=float(epsilon), use_fast_variance=False, rngs=nnx.Rngs(0))
    layer.scale, layer.bias = nnx.Param(scale), nnx.Param(bias)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the converter reads values as older versions of Flax do
        return layer(tokens)


def _attend(*inputs: Any) -> jax.Array:
    """Return attention softmax(QKᵀ/√d)·V of shape [B,h,Q,d], with h heads.

    The inputs are the queries [B,h,Q,d], the keys [B,h,T,d], the values [B,h,T,d], optionally a mask bool[…,Q,T], and
    the parameters of the equation, which are not used.
    """
    query, key, value, *mask, _ = inputs
    scores = jnp.matmul(query * query.shape[-1] ** -0.5, key.swapaxes(-1, -2))
    scores = jnp.where(mask[0], scores, np.finfo(np.float32).min) if mask else scores
    return jnp.matmul(jax.nn.softmax(scores, axis=-1), value)


def _max_pool(maps: jax.Array, settings: Mapping[str, Any]) -> jax.Array:
    """Return max-pooled maps f32[B,H,W,C], with `settings`, the parameters of `reduce_window`.

    B and C are joined, because ONNX runtimes pool over at most three axes.
    """
    batch, height, width, channels = maps.shape
    planes = maps.transpose(0, 3, 1, 2).reshape(batch * channels, height, width)
    shorter = {key: value[:3] for key, value in settings.items()}
    pooled = jax.lax.reduce_window(planes, -np.inf, jax.lax.max, **shorter)
    return pooled.reshape(batch, channels, *pooled.shape[1:]).transpose(0, 2, 3, 1)


# Name of a primitive that calls a function -> the parameter of the equation that holds the jaxpr of the function.
_BODIES = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
_SIMPLER: dict[str, Callable[..., jax.Array]] = {
    "reduce_window_max": _max_pool,
    # Runtimes do not fuse maxima and minima with the convolution before them.
    "jit relu": lambda value, settings: jax.nn.relu(value),
    "jit relu6": lambda value, settings: jnp.clip(value, 0, 6),
    # Runtimes have a kernel for each of these functions, and compute them in float32 in a program of 16 or 8 bits.
    "custom_vjp_call gelu": lambda value, settings: jax.nn.gelu(value, approximate=False),
    "custom_vjp_call _normalize": _layer_norm,
    "custom_vjp_call _attend": _attend,
    "dot_general": _matmul,
    "stop_gradient": lambda value, settings: value,
}
TARGET = ExportTarget(
    _write,
    _load,
    files={
        "model.onnx": f"the program, opset {_OPSET}; tensors above 1 MB are in `model.onnx.data`, which stays beside it"
    },
    install='pip install "onnxruntime>=1.17" numpy pillow',
    place=_place,
    needs={"eval.dtype": "float32"},  # runtimes have no matmuls of bfloat16 on CPUs
)

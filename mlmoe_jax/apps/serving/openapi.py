"""The OpenAPI document of the server, from which the page `/docs` is drawn too."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.apps.serving.requests import MULTIPART, RAW
from mlmoe_jax.runtime.version import __version__

_NUMBER, _TEXT = {"type": "number"}, {"type": "string"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
    }


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _map(values: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


_ATTENTION = _object(
    image={**_TEXT, "description": "The image as the model received it, a data URL."},
    grid={**_list({"type": "integer"}), "description": "Rows and columns of the patches; null without attention."}
    | {"type": ["array", "null"]},
    maps=_map(_object(queries=_list(_TEXT), weights=_list(_list(_NUMBER)))),
)
_RESULT = _object(
    ("image",),
    image={**_TEXT, "description": "The name that the client gave, or a number."},
    error={**_TEXT, "description": "Why the image cannot be read; the other fields are then missing."},
    labels={**_list(_TEXT), "description": "Those at or above their thresholds, or the top_k best, best first."},
    scores={**_map(_NUMBER), "description": "Probability of every label."},
    gates={**_map(_map(_list(_NUMBER))), "description": "Gate → label → weights of its entries."},
    attention={**_ATTENTION, "description": "Attention of queries over patches."},
)
_MODEL = _object(
    labels=_list(_object(name=_TEXT, threshold={"type": ["number", "null"]})),
    gates={**_map(_list(_TEXT)), "description": "Gate → names of its entries."},
    image_size={"type": "integer"},
    limits=_map(_NUMBER),
)
SCHEMAS = {
    "Results": _object(results=_list({"$ref": "#/components/schemas/Result"})),
    "Result": _RESULT,
    "Error": _object(error=_TEXT),
    "Model": _MODEL,
    "Health": _object(status={"type": "string", "enum": ["ready", "starting", "stopping"]}),
}


def _json(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def _parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def document(limits: ConfigDict, labels: int) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server. limits: `config.serve`. labels: K."""
    refusals = {
        "400": f"The form cannot be read or holds more than {limits.images} files.",
        "403": "The request comes from a page of another site, or was sent to another host name.",
        "408": f"The body did not arrive within {limits.seconds:g} s.",
        "413": f"The request is larger than {limits.megabytes} MiB.",
        "415": "The content type is another one.",
        "422": f"An option is wrong, or no image can be read; {limits.megapixels:g} million pixels are allowed.",
        "429": "The queue is full; try again after the seconds in Retry-After.",
        "500": "An error of the server.",
        "503": "The server is starting or stopping; try again after the seconds in Retry-After.",
        "504": f"There was no result within {limits.seconds:g} s.",
    }
    boolean = {"type": "boolean", "default": False}
    top_k = {"type": "integer", "minimum": 1, "maximum": labels}
    predict = {
        "summary": "Label images",
        "description": "One image as the body, or several as the files of a form. If one of several images cannot be "
        "read, its result has an error, and the others are labeled.",
        "parameters": [
            _parameter("top_k", top_k, "The number of labels per image, instead of thresholds."),
            _parameter("gates", boolean, "Return routing weights too."),
            _parameter("attention", boolean, "Return attention maps and the image as the model received it too."),
        ],
        "requestBody": {
            "required": True,
            "content": {
                "image/*": {"schema": {"type": "string", "format": "binary"}},
                RAW: {"schema": {"type": "string", "format": "binary"}},
                MULTIPART: {"schema": _object(images=_list({"type": "string", "format": "binary"}))},
            },
        },
        "responses": {"200": _json("One result per image, in their order.", "Results")}
        | {status: _json(text, "Error") for status, text in refusals.items()},
    }
    model = {"summary": "Labels, thresholds and limits", "responses": {"200": _json("The model.", "Model")}}
    health = {
        "summary": "Whether the server is ready",
        "responses": {"200": _json("It is ready.", "Health"), "503": _json("It is starting or stopping.", "Health")},
    }
    text = {"description": "The text format of Prometheus.", "content": {"text/plain": {"schema": _TEXT}}}
    metrics = {"summary": "Counters for Prometheus", "responses": {"200": text}}
    paths = {"/predict": {"post": predict}} | {
        path: {"get": operation} for path, operation in (("/model", model), ("/health", health), ("/metrics", metrics))
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlmoe_jax", "version": __version__, "description": "Multi-label image classification."},
        "paths": paths,
        "components": {"schemas": SCHEMAS},
    }

"""The routes of the Open Inference Protocol (KServe v2), with its extension for tensors in binary form.

A request has one tensor: `image`, encoded files, or `pixels` at the model's size. In JSON, a file is written in base64.
The answer has `probability` and `labels`, whose elements are written like a cell of predictions.csv.
"""

from __future__ import annotations

import base64
import itertools
import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mlmoe_jax.apps.serving.service import RAW, READY, Images, Service
from mlmoe_jax.data.images import BadImage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.formats import dump_json, join_names
from mlmoe_jax.runtime.version import __version__

HEADER_LENGTH = "Inference-Header-Content-Length"  # bytes of the JSON text before binary tensors
IMAGE, PIXELS, PROBABILITY, LABELS = "image", "pixels", "probability", "labels"
BYTES, UINT8, FP32 = "BYTES", "UINT8", "FP32"
_AXES, _MOST_PARAMETERS = 4, 10


# ------------------------------------------------------------------------------------------------------------ messages
class _Strict(BaseModel):
    """Parameters without unknown names, of which some, such as Triton's `classification`, change a tensor."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MOST_PARAMETERS:  # each would be an error with its own memory
            raise ValueError("there are too many parameters")
        return value


class _InputParameters(BaseModel):
    binary_data_size: int | None = Field(None, ge=0)


class _Input(BaseModel):
    name: Literal["image", "pixels"]
    datatype: Literal["BYTES", "UINT8"]
    shape: list[Annotated[int, Field(ge=0)]] = Field(max_length=_AXES)
    parameters: _InputParameters = _InputParameters()
    data: list[Any] | None = None


class _OutputParameters(_Strict):
    binary_data: bool | None = None


class _Output(BaseModel):
    name: Literal["probability", "labels"]
    parameters: _OutputParameters = _OutputParameters()


class _Parameters(_Strict):
    binary_data_output: bool = False
    top_k: int | None = Field(None, ge=1)


class _Message(BaseModel):
    id: str = Field("", max_length=1000)
    parameters: _Parameters = _Parameters()
    inputs: list[_Input] = Field(min_length=1, max_length=1)
    outputs: list[_Output] = Field([_Output(name=PROBABILITY), _Output(name=LABELS)], max_length=2)


@dataclass(frozen=True)
class _Call:
    """A request: encoded images or pixels u8[N,H,W,3]."""

    message: _Message
    images: Images | np.ndarray

    def __len__(self) -> int:
        return len(self.images)


# -------------------------------------------------------------------------------------------------------------- routes
def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes below /v2 of a service to an application; UserError if no address can have the model's name."""
    name, side = service.labeler.name, service.labeler.describe()["image_size"]
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise UserError(f"serve.name={name} is part of an address; write it with letters from a to z, digits and ._-")
    model_url = f"/v2/models/{name}"

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        """Return the name and the extensions of the server."""
        return {"name": "mlmoe_jax", "version": __version__, "extensions": ["binary_tensor_data"]}

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """Return the status 200."""
        return {"live": True}

    @app.get("/v2/health/ready", responses={503: {"description": "It is starting or stopping."}})
    @app.get(f"{model_url}/ready", responses={503: {"description": "It is starting or stopping."}})
    async def ready(response: Response) -> dict[str, bool]:
        """Return the status 200 if the model is ready."""
        response.status_code = 200 if service.state == READY else 503
        return {"ready": service.state == READY}

    @app.get(model_url)
    async def model() -> dict[str, Any]:
        """Return the tensors of the model, and its labels with thresholds."""
        labels = service.describe()["labels"]
        inputs = (IMAGE, BYTES, [-1]), (PIXELS, UINT8, [-1, side, side, 3])
        outputs = (PROBABILITY, FP32, [-1, len(labels)]), (LABELS, BYTES, [-1])
        tensors = {"inputs": list(map(_described, inputs)), "outputs": list(map(_described, outputs))}
        return {"name": name, "platform": "mlmoe_jax", **tensors, "labels": labels}

    schema = {"requestBody": {"content": {kind: {} for kind in ("application/json", RAW)}, "required": True}}

    @app.post(f"{model_url}/infer", openapi_extra=schema)
    async def infer(request: Request) -> Response:
        """Label the images of one tensor."""
        return await service.admit(partial(_read, service, request, side), partial(_answer, service))

    @app.api_route("/v2/models/{path:path}", methods=["GET", "POST"], include_in_schema=False)
    async def other(path: str) -> None:
        raise HTTPException(404, f"the only model of this server is {name}, without versions")


def _described(tensor: tuple[str, str, list[int]]) -> dict[str, Any]:
    return dict(zip(("name", "datatype", "shape"), tensor, strict=True))


# ------------------------------------------------------------------------------------------------------------- request
async def _read(service: Service, request: Request, side: int) -> _Call:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "the body should not be compressed")
    body = b"".join([part async for part in service.parts(request)])
    length = request.headers.get(HEADER_LENGTH)
    return await service.in_reader(_parsed, body, length, side, service.most_images)


def _parsed(body: bytes, length: str | None, side: int, most: int) -> _Call:
    """Return the request of a body; HTTPException if it is malformed or has too many images."""
    if length is not None and not (re.fullmatch(r"\d{1,12}", length) and int(length) <= len(body)):
        raise HTTPException(400, f"{HEADER_LENGTH} should be the length of the JSON text in the body")
    size = len(body) if length is None else int(length)
    try:
        message = _Message.model_validate_json(body[:size])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:100] or "the body"
        raise HTTPException(400, f"{where} is wrong: {first['msg']}") from error
    [tensor] = message.inputs
    datatype, shapes = (BYTES, ([], [1])) if tensor.name == IMAGE else (UINT8, ([side, side, 3],))
    if tensor.datatype != datatype or tensor.shape[1:] not in shapes or not tensor.shape:
        expected = ", ".join(map(str, ("N", *shapes[0])))
        raise HTTPException(400, f"the tensor {tensor.name} should be {datatype} of shape [{expected}]")
    if not 1 <= tensor.shape[0] <= most:
        raise HTTPException(400, f"the tensor {tensor.name} should have 1 to {most} images")
    try:
        return _Call(message, _values(tensor, body[size:]))
    except (ValueError, TypeError) as error:
        reason = f"the content of the tensor {tensor.name} does not fit its data type, shape and size"
        raise HTTPException(400, reason) from error


def _values(tensor: _Input, binary: bytes) -> Images | np.ndarray:
    """Return encoded images, or pixels; ValueError or TypeError if they do not fit the tensor."""
    declared, data = tensor.parameters.binary_data_size, tensor.data
    if len(binary) != (declared or 0) or (declared is None) == (data is None):
        raise ValueError("binary data of another size, or both kinds of data")
    for _ in range(_AXES - 1):
        if data and isinstance(data[0], list):
            data = list(itertools.chain.from_iterable(data))
    if tensor.name == IMAGE:
        contents = _elements(binary) if data is None else [base64.b64decode(text, validate=True) for text in data]
        if len(contents) != tensor.shape[0]:
            raise ValueError("another number of elements")
        return [(f"image {at}", content) for at, content in enumerate(contents)]
    # `bytes` refuses all but integers from 0 to 255.
    return np.frombuffer(binary if data is None else bytes(data), np.uint8).reshape(tensor.shape)


def _elements(binary: bytes) -> list[bytes]:
    """Return the elements of a BYTES tensor, each after its length in four bytes."""
    elements, at = [], 0
    while at < len(binary):
        start = at + 4
        at = start + int.from_bytes(binary[at:start], "little")
        elements.append(binary[start:at])
    if at != len(binary):
        raise ValueError("a truncated element")
    return elements


# -------------------------------------------------------------------------------------------------------------- answer
async def _answer(service: Service, call: _Call) -> Response:
    """Return the response with the outputs that a request names."""
    message, predictor = call.message, service.labeler.predictor
    service.require_top_k(message.parameters.top_k)
    images = list(call.images) if isinstance(call.images, np.ndarray) else await service.decode(call.images)
    if bad := [image for image in images if isinstance(image, BadImage)]:
        raise HTTPException(422, str(bad[0]))
    outputs = await service.label(images)
    results = [predictor.result("", output.logits, message.parameters.top_k) for output in outputs]
    tensors = {
        PROBABILITY: (FP32, np.array([list(result.scores.values()) for result in results], np.float32)),
        LABELS: (BYTES, np.array([join_names(result.labels) for result in results], object)),
    }
    entries, contents = [], []
    for output in message.outputs:
        datatype, values = tensors[output.name]
        entry = _described((output.name, datatype, list(values.shape)))
        binary = output.parameters.binary_data
        if message.parameters.binary_data_output if binary is None else binary:
            contents.append(_encoded(values))
            entry["parameters"] = {"binary_data_size": len(contents[-1])}
        else:
            entry["data"] = values.ravel().tolist()
        entries.append(entry)
    head = {"model_name": service.labeler.name, **({"id": message.id} if message.id else {}), "outputs": entries}
    if not contents:
        return JSONResponse(head)
    text = dump_json(head).encode()
    return Response(b"".join([text, *contents]), headers={HEADER_LENGTH: str(len(text))}, media_type=RAW)


def _encoded(values: np.ndarray) -> bytes:
    if values.dtype != object:
        return values.astype("<f4").tobytes()
    texts = [text.encode() for text in values]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)

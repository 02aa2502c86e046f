"""The routes of the Open Inference Protocol (KServe v2), with its extension for tensors in binary form.

A request has one tensor: either `image` with encoded image files, or `pixels` with images of the model's size. In JSON,
a file is written in base64. The response has the tensors `probability` and `labels`. An element of `labels` has the
names of all labels of an image, written like a cell of predictions.csv.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mlmoe_jax.apps.serving.request_images import RAW, RequestImages, require_small_json
from mlmoe_jax.apps.serving.service import UNREADY, Options, Service
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.formats import dump_json, join_names
from mlmoe_jax.runtime.version import __version__

HEADER_LENGTH = "Inference-Header-Content-Length"  # bytes of the JSON text before binary tensors
_AXES, _MOST_PARAMETERS = 4, 10
_MOST_NAMES = 1000  # names, texts and objects of a message, among them encoded images


# ------------------------------------------------------------------------------------------------------------ messages
class _Strict(BaseModel):
    """Parameters of a message that refuse unknown names.

    Unknown parameters are not ignored, because some of them would change a tensor, such as Triton's `classification`.
    """

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
    outputs: list[_Output] = Field([_Output(name="probability"), _Output(name="labels")], max_length=2)


# -------------------------------------------------------------------------------------------------------------- routes
def add_inference_routes(app: FastAPI, service: Service) -> None:
    """Add the routes below /v2 to an application.

    Raises UserError if the name of the model cannot be part of a URL.
    """
    name = service.labeler.name
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise UserError(f"serve.name={name} is part of an address; write it with letters from a to z, digits and ._-")
    model_url = f"/v2/models/{name}"
    body = {"required": True, "content": {"application/json": {}, RAW: {}}}

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        """Return the name and the extensions of the server."""
        return {"name": "mlmoe_jax", "version": __version__, "extensions": ["binary_tensor_data"]}

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """Return the HTTP status 200 while the server runs."""
        return {"live": True}

    @app.get("/v2/health/ready", responses=UNREADY)
    @app.get(f"{model_url}/ready", responses=UNREADY)
    async def ready(response: Response) -> dict[str, bool]:
        """Return the HTTP status 200 if the model is ready, and 503 otherwise."""
        response.status_code = service.health
        return {"ready": service.health == 200}

    @app.get(model_url)
    async def model() -> dict[str, Any]:
        """Return the names, data types and shapes of the input and output tensors, and the labels with thresholds."""
        return _describe_model(service)

    @app.post(f"{model_url}/infer", openapi_extra={"requestBody": body})
    async def infer(request: Request) -> Response:
        """Label the images in the input tensor of the request."""
        return await _infer(service, request)

    @app.api_route("/v2/models/{path:path}", methods=["GET", "POST"], include_in_schema=False)
    async def refuse_model(path: str) -> None:
        raise HTTPException(404, f"the only model of this server is {name}, without versions")


async def _infer(service: Service, request: Request) -> Response:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "the body should not be compressed")
    async with service.admit() as arrived:
        body = await service.body(request)
        length = request.headers.get(HEADER_LENGTH)
        side = service.describe()["image_size"]
        arrived(1)
        message, images = await service.in_reader(_parse_body, body, length, side, service.most_images)
        arrived(len(images))
        options = Options(top_k=message.parameters.top_k)
        service.check(options)
        results = await service.results(images, options)
    for result in results:
        if "error" in result:
            raise HTTPException(422, result["error"])
    return _respond(message, service.labeler.name, results)


def _describe_model(service: Service) -> dict[str, Any]:
    described = service.describe()
    labels, side = described["labels"], described["image_size"]
    image = _describe_tensor("image", "BYTES", [-1])
    pixels = _describe_tensor("pixels", "UINT8", [-1, side, side, 3])
    probability = _describe_tensor("probability", "FP32", [-1, len(labels)])
    names = _describe_tensor("labels", "BYTES", [-1])
    tensors = {"inputs": [image, pixels], "outputs": [probability, names]}
    return {"name": service.labeler.name, "platform": "mlmoe_jax", **tensors, "labels": labels}


def _describe_tensor(name: str, datatype: str, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}


# ------------------------------------------------------------------------------------------------------------- request
def _parse_body(body: bytes, header_length: str | None, side: int, most: int) -> tuple[_Message, RequestImages]:
    """Parse the body of a request.

    Args:
      body: JSON text, which binary data may follow.
      header_length: value of the header HEADER_LENGTH, the length of the JSON text in bytes; None = the whole body.
      side: height and width of the model's images in pixels.
      most: the largest number of images.

    Returns:
      The message, and the images of its tensor with their names.

    Raises:
      HTTPException: the body is malformed, has too many values, or has more than `most` images.
    """
    text = str(len(body)) if header_length is None else header_length
    if not re.fullmatch(r"\d{1,12}", text) or int(text) > len(body):
        raise HTTPException(400, f"{HEADER_LENGTH} should be the length of the JSON text in the body")
    length = int(text)
    require_small_json(body[:length], _MOST_NAMES, 100 + most * (1 + side + side**2))  # an image is a list of rows
    message = _parse_message(body[:length])
    [tensor] = message.inputs
    if problem := _shape_problem(tensor, side, most):
        raise HTTPException(400, problem)
    try:
        images = _read_tensor(tensor, body[length:])
    except (ValueError, TypeError) as error:
        reason = f"the content of the tensor {tensor.name} does not fit its data type, shape and size"
        raise HTTPException(400, reason) from error
    return message, [(f"image {at}", image) for at, image in enumerate(images)]


def _parse_message(text: bytes) -> _Message:
    try:
        return _Message.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))[:100] or "the body"
        raise HTTPException(400, f"{field} is wrong: {first['msg']}") from error


def _shape_problem(tensor: _Input, side: int, most: int) -> str:
    """Return a sentence about a wrong data type, shape or number of images of a tensor; "" if all are correct.

    Args:
      tensor: the input tensor.
      side: height and width of the model's images in pixels.
      most: the largest number of images.
    """
    if tensor.name == "image":
        datatype, shape, fits = "BYTES", "[N]", tensor.shape[1:] in ([], [1])
    else:
        datatype, shape, fits = "UINT8", f"[N, {side}, {side}, 3]", tensor.shape[1:] == [side, side, 3]
    if tensor.datatype != datatype or not tensor.shape or not fits:
        return f"the tensor {tensor.name} should be {datatype} of shape {shape}"
    if not 1 <= tensor.shape[0] <= most:
        return f"the tensor {tensor.name} should have 1 to {most} images"
    return ""


def _read_tensor(tensor: _Input, binary: bytes) -> Sequence[bytes | np.ndarray]:
    """Return the content of an input tensor: N encoded images, or pixels u8[N,H,W,3].

    Args:
      tensor: the description of the tensor, with its data if they are in JSON.
      binary: the binary data after the JSON text.

    Raises:
      ValueError or TypeError: the data do not match the shape, the data type or the size of the tensor.
    """
    declared, data = tensor.parameters.binary_data_size, _flatten(tensor.data)
    if len(binary) != (declared or 0) or (declared is None) == (data is None):
        raise ValueError("binary data of another size, or both kinds of data")
    if tensor.name == "pixels":
        # `bytes` refuses all but integers from 0 to 255.
        return np.frombuffer(binary if data is None else bytes(data), np.uint8).reshape(tensor.shape)
    contents = _split_elements(binary) if data is None else [base64.b64decode(text, validate=True) for text in data]
    if len(contents) != tensor.shape[0]:
        raise ValueError("another number of elements")
    return contents


def _flatten(data: list[Any] | None) -> list[Any] | None:
    """Return nested lists with at most _AXES levels as one flat list; None if `data` is None."""
    for _ in range(_AXES - 1):
        if data and isinstance(data[0], list):
            data = list(itertools.chain.from_iterable(data))
    return data


def _split_elements(binary: bytes) -> list[bytes]:
    """Return the elements of a BYTES tensor in binary form; [] if the last element is truncated.

    In `binary`, each element is preceded by its length as a little-endian integer of four bytes.
    """
    elements, at = [], 0
    while at < len(binary):
        start = at + 4
        at = start + int.from_bytes(binary[at:start], "little")
        elements.append(binary[start:at])
    return elements if at == len(binary) else []


# -------------------------------------------------------------------------------------------------------------- answer
def _respond(message: _Message, model: str, results: Sequence[Mapping[str, Any]]) -> Response:
    """Return the response to a message: JSON text, followed by the bytes of the tensors in binary form, if any.

    Args:
      message: the request.
      model: the name of the model.
      results: the result of each image.
    """
    entries, contents = [], []
    for output in message.outputs:
        datatype, values = _output_tensor(output.name, results)
        entry = _describe_tensor(output.name, datatype, list(values.shape))
        binary = output.parameters.binary_data
        if message.parameters.binary_data_output if binary is None else binary:
            contents.append(_encode(values))
            entry["parameters"] = {"binary_data_size": len(contents[-1])}
        else:
            entry["data"] = values.ravel().tolist()
        entries.append(entry)
    head = {"model_name": model, **({"id": message.id} if message.id else {}), "outputs": entries}
    if not contents:
        return JSONResponse(head)
    text = dump_json(head).encode()
    return Response(b"".join([text, *contents]), headers={HEADER_LENGTH: str(len(text))}, media_type=RAW)


def _output_tensor(name: str, results: Sequence[Mapping[str, Any]]) -> tuple[str, np.ndarray]:
    """Return the data type and the values of an output tensor: "FP32" and f32[N,K], or "BYTES" and N texts."""
    if name == "probability":
        return "FP32", np.array([list(result["scores"].values()) for result in results], np.float32)
    return "BYTES", np.array([join_names(result["labels"]) for result in results], object)


def _encode(values: np.ndarray) -> bytes:
    """Return the binary form of an output tensor.

    Numbers are little-endian float32. Each text is preceded by its length as a little-endian integer of four bytes.
    """
    if values.dtype != object:
        return values.astype("<f4").tobytes()
    texts = [text.encode() for text in values]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)

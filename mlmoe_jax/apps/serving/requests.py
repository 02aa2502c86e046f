"""What requests and answers hold, as schemas of the OpenAPI document, and the images of a request."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import HTTPException, Request, UploadFile
from pydantic import BaseModel, ConfigDict, Field
from starlette.formparsers import MultiPartException, MultiPartParser

RAW, MULTIPART = "application/octet-stream", "multipart/form-data"
_LONGEST_NAME = 200
_MOST_DROPPED = 64 << 20  # bytes of a body that is too large
_BYTES = {"type": "string", "format": "binary"}
_FILES = {"type": "object", "properties": {"images": {"type": "array", "items": _BYTES}}}
# The body of /predict in the OpenAPI document: one image, or several as the files of a form.
BODY = {
    "required": True,
    "content": {"image/*": {"schema": _BYTES}, RAW: {"schema": _BYTES}, MULTIPART: {"schema": _FILES}},
}


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Options(_Schema):
    """The query of /predict."""

    top_k: int | None = Field(None, ge=1, description="Number of labels per image, instead of thresholds.")
    gates: bool = Field(False, description="Return routing weights too.")
    attention: bool = Field(False, description="Return attention maps and the image as the model received it too.")


class Attention(_Schema):
    """The attention of a model in an image: of each kind, the queries and their weights over the patches."""

    image: str = Field(description="The image as the model received it, a data URL.")
    grid: tuple[int, int] | None = Field(description="Rows and columns of the patches; null without attention.")
    maps: dict[str, dict[str, list[str] | list[list[float]]]]


class Result(_Schema):
    """The result for one image: an error, or all of its labels and scores."""

    image: str = Field(description="The name that the client gave, or a number.")
    error: str = Field("", description="Why the image cannot be read; the other fields are then missing.")
    labels: list[str] = Field([], description="Labels at or above their thresholds, or the top_k best, best first.")
    scores: dict[str, float] = Field({}, description="Probability of every label.")
    gates: dict[str, dict[str, list[float]]] = Field({}, description="Gate → label → weights of its entries.")
    attention: Attention | None = None


class Results(_Schema):
    """One result per image, in their order."""

    results: list[Result]


class Error(_Schema):
    """Why a request has no results, in one sentence."""

    error: str


class Model(_Schema):
    """The model that is served."""

    labels: list[dict[str, str | float | None]] = Field(description="Names and thresholds; null = never assigned.")
    gates: dict[str, list[str]] = Field(description="Gate → names of its entries.")
    image_size: int
    limits: dict[str, float]


# ------------------------------------------------------------------------------------------------ images of a request
async def images_of(request: Request, *, most_bytes: int, most_images: int) -> list[tuple[str, bytes]]:
    """Return (name, content) of each image of a request; the names are from the client, or numbers.

    Raises:
      HTTPException: the body is neither an image nor a form, has no image, or has more or larger ones.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = _limited(request, most_bytes)
    if kind == MULTIPART:
        images = await _files(request, body, most_images)
    elif kind == RAW or kind.startswith("image/"):
        images = [("image 0", b"".join([part async for part in body]))]
    else:
        raise HTTPException(415, f"the content type should be {MULTIPART}, image/… or {RAW}")
    if not any(content for _, content in images):
        raise HTTPException(422, "the request has no image")
    return images


class _Parser(MultiPartParser):
    spool_max_size = 1 << 40  # files stay in memory, never on disk
    complete = False  # a form that is cut short is no error otherwise

    def on_end(self) -> None:
        self.complete = True


async def _files(request: Request, body: AsyncIterator[bytes], most: int) -> list[tuple[str, bytes]]:
    parser = _Parser(request.headers, body, max_files=most, max_fields=most)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise HTTPException(400, f"the body should be {MULTIPART} with 1 to {most} files") from error
    if not parser.complete:
        raise HTTPException(400, "the body is cut short")
    files = [value for _, value in form.multi_items() if not isinstance(value, str)]
    return [(_name(file, at), await file.read()) for at, file in enumerate(files)]


def _name(file: UploadFile, at: int) -> str:
    name = "".join(letter for letter in (file.filename or "") if letter.isprintable())[:_LONGEST_NAME]
    return name or f"image {at}"


async def _limited(request: Request, most: int) -> AsyncIterator[bytes]:
    """Yield the body of a request; 413 if it is too large.

    Many clients read no answer before they have sent everything: the rest of a body is read and dropped, unless the
    client waits for a sign to send it, or there is too much of it.
    """
    too_large = HTTPException(413, f"the request has more than {most:,} bytes", {"Connection": "close"})
    declared, size = int(request.headers.get("content-length", "0")), 0
    if declared > most and "expect" in request.headers:
        raise too_large
    async for part in request.stream():
        size += len(part)
        if size > most + _MOST_DROPPED:
            raise too_large
        if max(size, declared) <= most:
            yield part
    if max(size, declared) > most:
        raise too_large

"""Read the images of a request to /predict: the body is one image, or a form with several images."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from fastapi import HTTPException, Request
from starlette.formparsers import MultiPartException, MultiPartParser

from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.runtime.text import printable

RAW, MULTIPART = "application/octet-stream", "multipart/form-data"
_LONGEST_NAME = 200
_IMAGE = {"schema": {"type": "string", "format": "binary"}}
_IMAGES = {"schema": {"type": "object", "properties": {"images": {"type": "array", "items": _IMAGE["schema"]}}}}
# The body of /predict in the OpenAPI document: one image, or several as the files of a form.
BODY = {
    "required": True,
    "content": {"image/*": _IMAGE, RAW: _IMAGE, MULTIPART: _IMAGES},
}

# Pairs (name, content), where the content is an encoded image, or the error of an unreadable image.
RequestImages = Sequence[tuple[str, bytes | BadImage]]


@dataclass(frozen=True)
class RequestLimits:
    """The limits of requests.

    Attributes:
      images: the largest number of images of a request; at most `queue`.
      megabytes: the largest size of a body in MiB.
      megapixels: the largest number of pixels of an image, in millions.
      seconds: the longest time from the head of a request until its result, including the arrival of the body.
      queue: the largest number of images in progress: decoded, waiting or labeled. Further requests get the status 429.
    """

    images: int = 32
    megabytes: int = 16
    megapixels: float = 50.0
    seconds: float = 30.0
    queue: int = 128


LIMITS = RequestLimits()


async def read_body(request: Request, limits: RequestLimits) -> bytes:
    """Return the body of a request. Raise HTTPException (413) if it is too large."""
    return b"".join([part async for part in _parts(request, limits)])


async def _parts(request: Request, limits: RequestLimits) -> AsyncIterator[bytes]:
    size, most = 0, limits.megabytes << 20
    declared = int(request.headers.get("content-length", "0"))
    if declared <= most:
        async for part in request.stream():
            size += len(part)
            if size > most:
                break
            yield part
    if max(size, declared) > most:
        raise HTTPException(413, f"the request has more than {most:,} bytes", {"Connection": "close"})


async def read_request_images(request: Request, limits: RequestLimits) -> RequestImages:
    """Return (name, encoded content) of each image of a request to /predict.

    The name is the file name that the client sends, or "image" with a number. Raises HTTPException if the body is
    neither an image nor a form, has no image, or exceeds a limit.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == MULTIPART:
        images = await _read_files(request, limits)
    elif kind == RAW or kind.startswith("image/"):
        images = [("image 0", await read_body(request, limits))]
    else:
        raise HTTPException(415, f"the content type should be {MULTIPART}, image/… or {RAW}")
    if not any(content for _, content in images):
        raise HTTPException(422, "the request has no image")
    return images


class _FormParser(MultiPartParser):
    """A parser of multipart forms that keeps all files in memory. `complete` is True after the end of the form."""

    spool_max_size = 1 << 40
    complete = False

    def on_end(self) -> None:
        self.complete = True


async def _read_files(request: Request, limits: RequestLimits) -> RequestImages:
    async def whole() -> AsyncIterator[bytes]:
        async for part in _parts(request, limits):
            yield part
        if not parser.complete:  # the parser accepts a truncated form; it closes its files after an error
            raise MultiPartException("the form is truncated")

    most = limits.images
    parser = _FormParser(request.headers, whole(), max_files=most, max_fields=most)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise HTTPException(400, f"the body should be a whole {MULTIPART} with 1 to {most} files") from error
    try:
        files = [value for _, value in form.multi_items() if not isinstance(value, str)]
        return [
            (printable(file.filename or f"image {at}", _LONGEST_NAME), await file.read())
            for at, file in enumerate(files)
        ]
    finally:
        await form.close()

"""Read the images of a request to /predict: the body is one image, or a form with several images."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from fastapi import HTTPException, Request, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from mlmoe_jax.data.images import BadImage

RAW, MULTIPART = "application/octet-stream", "multipart/form-data"
_LONGEST_NAME = 200
_BYTES = {"type": "string", "format": "binary"}
_FILES = {"type": "object", "properties": {"images": {"type": "array", "items": _BYTES}}}
# The body of /predict in the OpenAPI document: one image, or several as the files of a form.
BODY = {
    "required": True,
    "content": {"image/*": {"schema": _BYTES}, RAW: {"schema": _BYTES}, MULTIPART: {"schema": _FILES}},
}

# Pairs (name, content), where the content is an encoded image, or the error of an unreadable image.
RequestImages = Sequence[tuple[str, bytes | BadImage]]


async def limited_body(request: Request, most: int) -> AsyncIterator[bytes]:
    """Yield the body of a request in parts. Raise HTTPException (413) if the body is larger than `most` bytes."""
    size = 0
    declared = int(request.headers.get("content-length", "0"))
    if declared <= most:
        async for part in request.stream():
            size += len(part)
            if size > most:
                break
            yield part
    if max(size, declared) > most:
        raise HTTPException(413, f"the request has more than {most:,} bytes", {"Connection": "close"})


async def read_request_images(request: Request, body: AsyncIterator[bytes], most_images: int) -> RequestImages:
    """Return (name, encoded content) of each image of a request to /predict.

    The name is the file name that the client sends, or "image" with a number.

    Args:
      request: the request.
      body: the parts of the body, as `limited_body` yields them.
      most_images: the largest number of images.

    Raises:
      HTTPException: the body is neither an image nor a form, has no image, or exceeds a limit.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == MULTIPART:
        images = await _read_files(request, body, most_images)
    elif kind == RAW or kind.startswith("image/"):
        images = [("image 0", b"".join([part async for part in body]))]
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


async def _read_files(request: Request, body: AsyncIterator[bytes], most: int) -> RequestImages:
    async def whole() -> AsyncIterator[bytes]:
        async for part in body:
            yield part
        if not parser.complete:  # the parser accepts a truncated form; it closes its files after an error
            raise MultiPartException("the form is truncated")

    parser = _FormParser(request.headers, whole(), max_files=most, max_fields=most)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise HTTPException(400, f"the body should be a whole {MULTIPART} with 1 to {most} files") from error
    try:
        files = [value for _, value in form.multi_items() if not isinstance(value, str)]
        return [(_file_name(file, at), await file.read()) for at, file in enumerate(files)]
    finally:
        await form.close()


def _file_name(file: UploadFile, at: int) -> str:
    name = "".join(letter for letter in (file.filename or "") if letter.isprintable())[:_LONGEST_NAME]
    return name or f"image {at}"
